"""The transfer plane over UCX, by UCXX, the maintained successor of ucx-py."""

from shared.kv.ucx.transfer import UcxTransfer

__all__ = ["UcxTransfer"]
