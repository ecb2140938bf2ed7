"""What the router costs: a real router process between scripted workers and clients."""
