"""Sends the requests and collects what comes back: open loop on a schedule, closed loop with a number of users."""
