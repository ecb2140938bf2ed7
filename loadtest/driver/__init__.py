"""Sends the requests and collects the answers: open loop on a schedule, closed loop with a number of users."""
