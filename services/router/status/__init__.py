"""The cluster as operators see it: status, requests, goodput over all models of one router."""
