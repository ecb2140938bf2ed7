"""Cost of the router: a real router process between scripted workers and clients."""
