"""The settings of block encryption, for modules that encrypt nothing themselves."""

from __future__ import annotations

from typing import Literal

Encryption = Literal["none", "aes-gcm", "chacha20-poly1305"]
NO_ENCRYPTION: Encryption = "none"
