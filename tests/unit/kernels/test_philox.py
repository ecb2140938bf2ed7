"""Philox against the known answers of its authors' Random123 distribution."""

import pytest

from shared.kernels.sampling.philox import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_depends_on_seed_and_position_alone_and_covers_the_unit_interval():
    values = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == len(values)
    assert uniform(7, 11) == uniform(7, 11)
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert uniform(2**64 - 1, 3) != uniform(2**32 - 1, 3)
