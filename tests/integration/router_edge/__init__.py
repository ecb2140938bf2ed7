"""The edge's real servers with real clients, and a scripted core behind them."""
