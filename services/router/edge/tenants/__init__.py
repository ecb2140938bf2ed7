"""Authentication and tenants: API keys, tenants, their rate limits."""
