"""Redis's wire protocol over asyncio: one server or a cluster, with bounded time and typed errors.

redis-py parses and checks per argument and per reply in Python; for the 512 keys of one match that costs the store six
times what the rest of the match does. Here a command is one prepared run of bytes and a reply is what hiredis returns.
"""
