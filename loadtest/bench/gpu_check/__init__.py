"""What first minutes on a GPU should tell: `make gpu-check`."""
