"""The few instructions of PTX that open codes, carried out on one 32-bit register each."""

from __future__ import annotations

import re

import torch

HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run(text: str, *inputs: int) -> int:
    """What `text` leaves in $0, for registers $1, $2, …"""
    registers = {f"${number + 1}": value for number, value in enumerate(inputs)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in text.strip("{}\n").split("\n"):
        if line.startswith(".reg"):
            continue
        match = re.fullmatch(r"([a-z0-9.]+) ([^;]+);", line)
        assert match is not None, line
        target, *names = match[2].split(", ")
        operands = [value(name) for name in names]
        registers[target] = _result(match[1], operands) & 0xFFFFFFFF
    return registers["$0"]


def _result(name: str, operands: list[int]) -> int:
    operation, *rest = name.split(".")
    if operation == "mov":
        return operands[0]
    if operation == "and":
        return operands[0] & operands[1]
    if operation in ("shr", "shl"):
        return operands[0] >> operands[1] if operation == "shr" else operands[0] << operands[1]
    if operation == "lop3":
        a, b, c, table = operands
        bits = ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1) for bit in range(32))
        return sum((table >> place & 1) << bit for bit, place in enumerate(bits))
    assert (operation, rest[0]) == ("fma", "rn"), name
    dtype = HALVES[rest[1]]
    a, b, c = (halves(operand, dtype).double() for operand in operands)
    return joined((a * b + c).to(dtype))


def halves(register: int, dtype: torch.dtype) -> torch.Tensor:
    """[2], the lower half first."""
    words = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.uint16)
    return words.view(dtype)


def joined(numbers: torch.Tensor) -> int:
    """The register of two numbers of 16 bits."""
    low, high = numbers.view(torch.uint16).tolist()
    return int(low) | int(high) << 16
