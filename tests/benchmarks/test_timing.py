import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they are not a package


@pytest.mark.parametrize("name", ["kernels", "attention_layer"])
def test_what_is_for_a_gpu_says_so_on_a_cpu_at_once(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(name).main()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(f"{name}.py: error: needs a GPU: ")
