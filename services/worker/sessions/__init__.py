"""The worker's end of its sessions with routers."""
