"""Redis's wire protocol over asyncio: one server or a cluster, with bounded time and typed errors.

redis-py checks every argument and reply in Python; for the 512 keys of one match this costs six times as much as the
rest of the match. Here a command is one prepared byte string, and a reply is the object that hiredis returns.
"""
