"""Ways to choose experts: the families', and small ones that differ in each rule."""

from __future__ import annotations

from dataclasses import replace

from shared.kernels.experts.routing_rules import Routing

PLAIN = Routing(num_experts=12, top_k=3, scoring="softmax", is_normalised=False)
ROUTINGS = {
    "softmax": PLAIN,
    "normalised": replace(PLAIN, is_normalised=True),
    "all experts": replace(PLAIN, top_k=12, is_normalised=True),
    "one expert": replace(PLAIN, top_k=1, is_normalised=True),
    "groups": replace(PLAIN, num_groups=4, top_groups=2, scale=16.0),
    "sigmoid": replace(PLAIN, scoring="sigmoid", num_groups=3, top_groups=2, group_score=2, scale=2.5, has_bias=True),
    "sigmoid, normalised": Routing(12, 3, "sigmoid", True, 2.5, 4, 3, 2, True),
}
FAMILIES = {
    "mixtral": Routing(8, 2, "softmax", True),
    "qwen3-moe": Routing(128, 8, "softmax", True),
    "deepseek-v2-lite": Routing(64, 6, "softmax", False),
    "deepseek-v2": Routing(160, 6, "softmax", False, 16.0, 8, 3, 1),
    "deepseek-v3": Routing(256, 8, "sigmoid", True, 2.5, 8, 4, 2, True),
}
