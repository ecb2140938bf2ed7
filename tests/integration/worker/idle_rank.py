"""A rank's process that computes nothing: ends with the process that started it, or by a signal."""

import signal

if __name__ == "__main__":
    signal.pause()
