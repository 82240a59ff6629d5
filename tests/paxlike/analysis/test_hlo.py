"""The parser of HLO text: shapes, instructions, every dialect we compile for, linear time."""

import gzip
import pathlib
import time

import pytest

from paxlike.analysis import hlo

SAMPLES = sorted((pathlib.Path(__file__).parent / "samples").glob("*.hlo.gz"))

SMALL = """HloModule jit_f, is_scheduled=true, num_partitions=4, replica_count=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,4]) -> (f32[8], s4[3]) {
  %x = f32[8,4]{1,0:T(8,128)S(1)} parameter(0), metadata={op_name="params[\\'x\\']"}
  %zero = f32[] constant(0)
  %r = f32[8]{0} reduce(f32[8,4]{1,0:T(8,128)S(1)} %x, f32[] %zero), dimensions={1}, \
to_apply=%add, metadata={op_name="jit(f)/s/reduce" stack_frame_id=3}, \
backend_config={"a":{"b":[1,2]}}
  %c = s4[3]{0:E(4)} constant({1, 2, 3})
  ROOT %t = (f32[8]{0}, /*index=1*/s4[3]{0:E(4)}) tuple(%r, /*index=1*/%c)
}
"""


@pytest.mark.parametrize(
    "text, size",
    [
        ("f32[]", 4),
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", 12),
        ("pred[5]", 5),
        ("s4[3]{0:E(4)}", 2),  # 12 bits, packed
        ("u2[4]", 1),
        ("f8e4m3fn[7]", 7),
        ("f4e2m1fn[4]", 2),
        ("c64[2]", 16),
        ("f32[<=8,2]", 64),
        ("token[]", 0),
        ("((f32[2]{0}, s8[3]), (bf16[4]{0:T(128)}), u32[]{:S(2)})", 8 + 3 + 8 + 4),
        ("()", 0),
    ],
)
def test_shape_bytes(text, size):
    assert hlo.parse_shape(text).bytes == size


def test_shape_keeps_structure_and_memory_space():
    shape = hlo.parse_shape("((f32[2]{0:S(5)}, /*index=1*/s8[3,1]), u32[])")
    assert [len(e.elements or ()) for e in shape.elements] == [2, 0]
    assert [(a.dtype, a.dims, a.memory_space) for a in shape.arrays()] == [
        ("f32", (2,), 5),
        ("s8", (3, 1), 0),
        ("u32", (), 0),
    ]


def test_parse_reads_every_part():
    module = hlo.parse(SMALL)
    assert (module.name, module.entry, module.is_scheduled) == ("jit_f", "main", True)
    assert (module.num_partitions, module.num_replicas, module.num_devices) == (4, 2, 8)
    main = module.computations["main"]
    assert list(main.instructions) == ["x", "zero", "r", "c", "t"]
    reduce = main.instructions["r"]
    assert (reduce.opcode, reduce.operands) == ("reduce", ("x", "zero"))
    assert reduce.called == {"to_apply": ("add",)}
    assert reduce.integers("dimensions") == (1,)
    assert reduce.op_name == "jit(f)/s/reduce"
    assert reduce.config() == {"a": {"b": [1, 2]}}
    assert main.root == "t" and main.instructions["t"].operands == ("r", "c")
    assert main.instructions["x"].op_name == "params['x']"
    assert main.instructions["c"].literal == "{1, 2, 3}"
    assert [user.name for user in main.users(main.instructions["x"])] == ["r"]


def test_names_without_percent_signs():
    module = hlo.parse(SMALL.replace("%", ""))
    assert module.computations["main"].instructions["r"].operands == ("x", "zero")
    assert module.computations["main"].instructions["r"].called == {"to_apply": ("add",)}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name.removesuffix(".hlo.gz"))
def test_samples_are_closed(path):
    """Every operand and called computation of a compiler's text is found, every root too."""
    module = hlo.parse(gzip.decompress(path.read_bytes()).decode())
    assert module.is_scheduled and module.num_devices == 8
    for computation in module.computations.values():
        assert computation.root in computation.instructions
        for instruction in computation:
            assert all(name in computation.instructions for name in instruction.operands)
            for names in instruction.called.values():
                assert all(name in module.computations for name in names)


def test_samples_exist():
    assert len(SAMPLES) == 32  # 8 programs, 2 targets, 2 versions of jax


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no 'HloModule' header"),
        ("HloModule x\n\n%c (a: f32[]) -> f32[] {\n}\n", "no ENTRY computation"),
        (SMALL.replace("%zero = f32[] constant(0)", "%zero = nonsense"), "not an HLO instruction"),
    ],
)
def test_bad_text_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        hlo.parse(text)


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="'float' is not an HLO element type"):
        hlo.dtype_bits("float")


def test_ten_megabytes_under_five_seconds_and_linear():
    text = gzip.decompress(
        next(p for p in SAMPLES if "v5e_0.10.2_transformer" in p.name).read_bytes()
    ).decode()
    header, rest = text.split("\n\n", 1)
    bodies, entry = rest.split("ENTRY ")

    def timed(copies):
        big = (
            header
            + "\n\n"
            + "".join(bodies.replace("%fused", f"%c{copy}_fused") for copy in range(copies))
        )
        big += "ENTRY " + entry.replace("%fused", "%c0_fused")
        begin = time.process_time()
        hlo.parse(big)
        return len(big), time.process_time() - begin

    small, seconds = timed(8)
    large, more_seconds = timed(70)
    assert large > 10_000_000
    assert more_seconds < 5
    assert more_seconds / large < 2.5 * seconds / small


def test_metadata_over_several_lines():
    """The TPU compiler prints what Pallas kernels say of themselves with line breaks."""
    text = """HloModule m

%called (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}",
"other":"}"
 }}, metadata={op_name="jit(f)/kernel"}, backend_config={"flag":1}
}, execution_thread="main"

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} call(%x), to_apply=%called
}
"""
    module = hlo.parse(text)
    called = module.computations["called"]
    assert called.root == "k" and list(called.instructions) == ["x", "k"]
    assert called.instructions["k"].op_name == "jit(f)/kernel"
    assert called.instructions["k"].config() == {"flag": 1}
    assert module.computations["main"].root == "c"
