import ast
import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they are not a package
import tpu_counts
import tpu_roofline

ROOT = Path(__file__).parents[2]
MIB = 2**20
V5P = tpu_roofline.CHIPS["v5p"]
NOTHING = tpu_counts.Counts(
    flops=0,
    products=0,
    transcendentals=0,
    vector_ops=0,
    copies=0,
    bytes=0,
    estimated_bytes=0,
    array_bytes=0,
    vmem=0,
    parallel=True,
)


def case_of(name, n):
    return {case.name: case for case in tpu_roofline.cases(n)}[name]


# Counts against numbers worked out by hand.


def test_dense_attention_is_counted_as_by_hand():
    counts = tpu_roofline.counts_of(case_of("dense_mla forward", 1024))

    # Tiles of 512 x 512, of which a causal range reaches 3 of 4; four heads a step, so 32 groups.
    assert counts.flops == counts.products == 2 * 128 * 3 * 512**2 * (192 + 128)
    assert counts.transcendentals == 128 * 3 * 512**2
    assert counts.copies == 0
    # In MiB: 192 columns lie in 256 lanes, so four heads of q or k are 1, of v or out 0.5.
    rows = 2 * 2 * 512 * 4 / MIB + 4 * 512 * 4 / MIB  # two bounds, the log-sum-exp
    loaded = 32 * (2 * (1 + 0.5 + rows) + 3 * (1 + 0.5))
    assert counts.bytes == pytest.approx(loaded * MIB, rel=0.01)
    scratch = 4 * 128 * 512 * 4 / MIB + 2 * 4 * 512 * 4 / MIB
    assert counts.vmem == pytest.approx((2 * (1 + 1 + 0.5 + 0.5 + rows) + scratch) * MIB, rel=0.01)


def test_gathered_attention_is_counted_as_by_hand():
    counts = tpu_roofline.counts_of(case_of("sparse_mla forward", 4096))

    pairs = 4096 * 2048
    assert counts.copies == pytest.approx(pairs, rel=1e-3)
    assert counts.flops == 2 * pairs * 128 * (
        640 + 512
    )  # 576 columns and that of validity, in tiles
    # A row of five tiles' columns fills eight sublanes of 128 bfloat16.
    others = 4096 * 128 * (640 * 2 + 512 * 2 + 4)
    assert counts.bytes == pytest.approx(pairs * 8 * 128 * 2 + others, rel=1e-3)
    buffers = 2 * 2048 * 8 * 128 * 2
    assert counts.vmem == pytest.approx(buffers + 2 * 128 * (640 * 2 + 512 * 2 + 4), rel=0.01)


def test_pages_are_counted_as_by_hand():
    counts = tpu_roofline.counts_of(case_of("paged_indexer_topk, 128 queries", 4096))

    assert (
        counts.copies == 128 * 4096 / 64 * 5 / 4
    )  # the first of four tiles is started apart, for no tile before it
    assert counts.flops == 2 * 128 * 8 * 64 * 128 * 4096  # a query fills eight rows
    others = 128 * 8 * (64 * 128 * 2 + 128 * 4 + 2 * 128 * 4 + 2048 * 4)  # in whole registers
    assert counts.bytes == pytest.approx(counts.copies * 64 * 128 * 2 + others, rel=0.01)


def test_the_search_for_the_threshold_is_32_passes_over_the_scores():
    case = case_of("indexer_topk mask", 2048)
    counts = tpu_roofline.counts_of(case)

    # The scores are in two tiles of 1024 keys, 3 of 4 are reached: 64 heads of three operations, 32 passes of three.
    pairs = 2048**2 * 3 / 4
    assert counts.flops == 2 * 64 * 128 * pairs
    assert 1 < counts.vector_ops / (pairs * (64 * 3 + 32 * 3)) < 1.5


@pytest.mark.parametrize("n", [1024, 4096])
def test_every_estimate_is_what_the_kernel_does(n):
    for case in tpu_roofline.cases(n):
        case = dataclasses.replace(case, causal=False, xla_bytes=0)
        # Here no tile of rows is shared by two experts.
        apart = dataclasses.replace(case, dynamic=-(-n // 2 // 512))
        counts, alone = tpu_roofline.counts_of(case), tpu_roofline.counts_of(apart)
        # Selection multiplies by a triangle of ones besides; d_out has no column of validity.
        assert 0.95 < alone.flops / alone.products <= 1, case.name
        assert 0.97 * counts.array_bytes <= counts.estimated_bytes < 1.05 * counts.bytes, case.name
        assert counts.vmem < V5P.vmem, case.name


def test_every_kernel_in_the_sources_has_an_estimate():
    calls = 0
    for path in (ROOT / "pallas_kernels").glob("*/pallas_tpu*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pl.pallas_call":
                calls += 1
                assert "cost_estimate" in {word.arg for word in node.keywords}, path
    assert calls >= 10


def test_a_kernel_without_an_estimate_is_named():
    def double(x):
        def kernel(x, out):
            out[...] = 2 * x[...]

        return jax.experimental.pallas.pallas_call(kernel, out_shape=x, name="bare")(x)

    with pytest.raises(ValueError, match="kernel bare has no CostEstimate"):
        tpu_counts.count(double, jax.ShapeDtypeStruct((8, 128), jnp.float32))


# Times and what follows from them.


@pytest.mark.parametrize(
    ("counts", "seconds", "bound"),
    [
        ({"flops": 459e12}, 1.0, "mxu"),
        ({"flops": 459e12, "parallel": False}, 2.0, "mxu"),  # one of two cores
        ({"bytes": 3 * 2765e9, "flops": 459e12}, 3.0, "hbm"),
        ({"vector_ops": 2 * 1.75e9 * 4096, "flops": 0.5 * 459e12}, 1.0, "vpu"),
        ({"transcendentals": 2 * 1.75e9 * 1024}, 1.0, "eup"),
        # Copies are issued before the products, not beside them.
        ({"copies": 2 * 1.75e9 / 4.75 * 2, "flops": 459e12}, 3.0, "issue"),
    ],
)
def test_times_are_counts_over_rates(counts, seconds, bound):
    times = tpu_roofline.times_of(dataclasses.replace(NOTHING, **counts), V5P)

    assert times.total == pytest.approx(seconds)
    assert times.bound == bound


def test_the_crossover_is_the_first_length_where_gathering_is_no_slower(monkeypatch):
    monkeypatch.setattr(tpu_roofline, "forms", lambda n, chip, backward: (n * n, 5000 * n))
    assert tpu_roofline.crossover(V5P, False) == 5120


def test_cheaper_copies_move_the_crossover_down():
    free = dataclasses.replace(V5P, copy_bundles=0.0)
    masked, gathered = tpu_roofline.forms(32768, V5P, False)
    assert tpu_roofline.forms(32768, free, False)[0] == masked
    assert tpu_roofline.forms(32768, free, False)[1] < gathered


# The command.


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    path = tmp_path / "roofline.json"
    words = ["tpu_roofline.py", "--lengths", "256", "--no-crossover", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", words)

    tpu_roofline.main()

    results = json.loads(path.read_text())["results"]
    table = capsys.readouterr().out
    assert {r["kernel"] for r in results} == {case.name for case in tpu_roofline.cases(256)}
    assert all(f"| {r['kernel']} | 256 |" in table for r in results)
    assert {"v5p", "v6e", "tpu7x"} == set(results[0]["seconds"])


@pytest.mark.parametrize(
    "lengths", ["100", "x", "", "4096,0", "4096,", "-128", "1e3", "4096,262272", "1" + 12 * "0"]
)
def test_wrong_lengths_are_one_line(monkeypatch, capsys, lengths):
    monkeypatch.setattr(sys, "argv", ["tpu_roofline.py", f"--lengths={lengths}"])
    with pytest.raises(SystemExit, match="2"):
        tpu_roofline.main()
    captured = capsys.readouterr()
    assert "must be multiples of 128 up to 262144, as 4096,32768" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("n", [128, 384, 262144])
def test_every_length_that_is_taken_can_be_counted(n):
    names = [case.name for case in tpu_roofline.cases(n)]
    assert len(names) == len(set(names))
    for case in tpu_roofline.cases(n):
        assert tpu_roofline.counts_of(case).flops > 0, case.name


@pytest.mark.parametrize("name", [".", "nowhere/roofline.json"])
def test_a_file_that_cannot_be_written_is_named_before_anything_is_counted(
    tmp_path, monkeypatch, capsys, name
):
    words = ["tpu_roofline.py", "--lengths", "128", "--json", str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        tpu_roofline.main()
    captured = capsys.readouterr()
    assert f"{tmp_path / name} cannot be written: " in captured.err
    assert captured.out == ""
