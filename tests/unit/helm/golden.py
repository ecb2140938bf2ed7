"""What the chart renders without values, kept in `golden/`: a change of it is seen in review.

`python -m tests.unit.helm.golden` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from tests.k8s.programs import find
from tests.unit.helm.charts import Helm

FILE = Path(__file__).parent / "golden" / "defaults.yaml"


def rendered(helm: Helm) -> str:
    """The defaults for the newest Kubernetes."""
    return "\n".join(line.rstrip() for line in helm.render().splitlines()) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(rendered(Helm(find("helm"))))
