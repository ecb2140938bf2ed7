"""Small values that routers share: kept responses and conversations, by tenant, with an end of life."""
