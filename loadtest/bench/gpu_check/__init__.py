"""What a first hour on a GPU should tell: `make gpu-check`."""
