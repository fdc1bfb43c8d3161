"""The table and the picture of `octavo bench --profile`, of made-up and of real profiles."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from octavo.api.outputs import OpProfile, Profile
from octavo.tools.bench import roofline

SVG = "{http://www.w3.org/2000/svg}"
OPS = [
    OpProfile("rows", "", 4, 0.1, 0.0, 0.0),
    OpProfile("linear 8 to 16 u4", "u4", 4, 0.6, 3e9, 3e11),
    OpProfile("attention", "", 2, 0.3, 6e9, 6e9),
]
PROFILE = Profile(OPS, bandwidth=40e9, rates={"u4": 1e12})


def test_bounds_are_the_larger_of_bytes_and_operations():
    assert [PROFILE.bound_s(op) for op in OPS] == pytest.approx([0.0, 0.3, 0.15])


def test_the_table_ranks_ops_by_time():
    lines = roofline.table(PROFILE).splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == [
        "linear 8 to 16 u4",
        "attention",
        "rows",
    ]
    assert lines[1].split()[5:] == ["4", "600.00", "60.0%", "5.0", "12%", "500.0", "50%", "50%"]
    assert lines[2].split()[1:] == ["2", "300.00", "30.0%", "20.0", "50%", "20.0", "50%"]
    assert lines[4].split() == ["all", "1000.00", "100.0%", "9.0", "22%", "306.0", "45%"]
    assert lines[5] == "most this machine gave: 40.0 GB/s from the weights' size; u4 1,000 GFLOP/s"
    assert roofline.table(replace(PROFILE, hop_s=27e-9)).endswith(
        "u4 1,000 GFLOP/s; 27 ns for a cache line from core to core"
    )


def test_the_picture_has_a_dot_for_each_counted_op_within_its_frame():
    root = ElementTree.fromstring(roofline.picture(PROFILE, "a < b"))
    dots = [circle for circle in root.iter(f"{SVG}circle") if circle.get("fill-opacity")]
    assert len(dots) == 2
    assert all(
        0 < float(dot.get("cx")) < roofline.WIDTH and 0 < float(dot.get("cy")) < roofline.HEIGHT
        for dot in dots
    )
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a < b" in texts and "linear 8 to 16 u4, 67%" in texts


def test_nothing_counted_makes_no_picture():
    with pytest.raises(ValueError, match="nothing ran"):
        roofline.picture(Profile(OPS[:1], 1e9, {}), "")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_real_profile(octavo, tiny, tmp_path, threads):
    picture = tmp_path / "profile.svg"
    sizes = ("--num-prompts=2", "--input-len=10", "--output-len=7")
    ended = octavo(
        "bench",
        "throughput",
        *tiny,
        f"--threads={threads}",
        *sizes,
        "--profile",
        f"--picture={picture}",
        "--json",
    )
    assert ended.code == 0, ended.err
    profile = json.loads(ended.out)["profile"]
    ops = {op["name"]: op for op in profile["ops"]}
    assert profile["bandwidth"] > 1e8 and all(rate > 1e8 for rate in profile["rates"].values())
    assert (profile["hop_s"] > 0) == (threads > 1)
    assert {"attention", "rows", "sample"} < set(ops)
    products = [op for op in profile["ops"] if op["code"]]
    assert products and all(
        op["seconds"] > 0 and op["num_bytes"] > 0 and op["operations"] > 0 for op in products
    )
    assert ElementTree.parse(picture).getroot().tag == f"{SVG}svg"


def test_the_reference_backend_is_not_profiled(octavo, tiny):
    options = [option for option in tiny if not option.startswith("--backend")]
    ended = octavo(
        "bench",
        "latency",
        *options,
        "--backend=reference",
        "--num-prompts=1",
        "--input-len=4",
        "--output-len=2",
        "--profile",
    )
    assert ended.code == 2
    assert "octavo: the reference backend does not support profiling ops" in ended.message
