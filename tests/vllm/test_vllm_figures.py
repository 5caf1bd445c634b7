"""Figures of the connector in a real engine, in one run: printed and kept in build/vllm.json; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_support import ROOT, skip_without_vllm

from tests.bench.vllm_engine_figures import measure

pytestmark = pytest.mark.vllm


def test_figures(tmp_path: Path) -> None:
    skip_without_vllm()
    figures = measure(tmp_path)
    figures["hit_per_miss"] = figures["hit_ttft_s"] / figures["miss_ttft_s"]
    figures["hit_per_example_connector_hit"] = figures["hit_ttft_s"] / figures["example_connector_hit_ttft_s"]
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "vllm.json").write_text(json.dumps(figures, indent=2) + "\n")
    print()
    for name, value in figures.items():
        print(f"{name:34} {value:.6f}")
