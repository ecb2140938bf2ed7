"""The hosts of one group: they meet over TCP, prove the fleet's key to each other, and notice each other's end."""
