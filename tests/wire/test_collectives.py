"""Every collective against NumPy, and the bytes it says against those in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sparsejax import wire
from sparsejax.wire import channels, gathers
from tests import helpers
from tests.helpers import AXIS, WIRE, Collective


RANKS = [1, 2, 5, 8]
COLUMNS = 6
every = pytest.mark.parametrize("n", [1, 5, *helpers.slow(2, 8)])


def shift(n):
    """Everyone sends to the next but one, rank 0 to nobody."""
    return tuple((source, (source + 2) % n) for source in range(1, n))


def programs(n):
    """Every function of `wire`, over n ranks, from a row [n, COLUMNS] a rank."""
    return {
        "psum": lambda x: WIRE.psum(x),
        "all_reduce": lambda x: WIRE.all_reduce(x),
        "all_reduce_bf16": lambda x: WIRE.all_reduce(x.astype(jnp.bfloat16)),
        "all_reduce_narrow": lambda x: WIRE.narrowed(jnp.float16).all_reduce(x),
        "maximum": lambda x: WIRE.maximum(x),
        "all_to_all": lambda x: WIRE.all_to_all(x),
        "all_gather": lambda x: WIRE.all_gather(x),
        "permute": lambda x: WIRE.permute(x, shift(n)),
        "bruck_all_gather": lambda x: gathers.bruck_all_gather(x, WIRE),
        "doubling_all_gather": lambda x: gathers.doubling_all_gather(x, WIRE),
        "push_channel": lambda x: sent(channels.push(WIRE), x),
        "pull_channel": lambda x: sent(channels.pull(WIRE), x[:1]),
        "swap_channel": lambda x: sent(channels.swap(WIRE, [shift(n)]), x[:1]),
        "bruck_channel": lambda x: sent(gathers.gather_channel(WIRE, "bruck"), x[:1]),
        "doubling_channel": lambda x: sent(gathers.gather_channel(WIRE, "doubling"), x[:1]),
        "rotated_channel": lambda x: sent(gathers.rotated_channel(WIRE, 2), x),
        "shift_channel": lambda x: sent(shifted(n), x),
    }


NAMES = list(programs(1))
# What sends over one rank, too: permutations.
ALONE = ("permute", "swap_channel", "shift_channel")


def sent(channel, x):
    """What a channel brings, typed as what it is, and its bytes for so many words."""
    message = as_words(x)
    received = channel.received(channel.send(message))
    return received, channel.route.bytes(message.shape[1])


def shifted(n):
    return gathers.shift_channel(WIRE, gathers.Rings(n, n), 1, n)


def as_words(x):
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def inputs(n):
    """Small integers, other ones in every place."""
    x = np.random.default_rng(n).permutation(n * n * COLUMNS) - 20
    return x.reshape(n, n, COLUMNS).astype(np.float32)


def traced(name, n, told=None, platform="cpu"):
    """The collectives of one function; what it says it sends goes to `told`."""

    def run(x):
        result, sent = programs(n)[name](x)
        if told is not None:
            told.append(sent)
        return result

    return helpers.traced_collectives(run, inputs(n), n, platform=platform)


def expected(n):
    """What each gives by NumPy; what all ranks have alike is there once."""
    x = inputs(n)
    # Integers below 2 * 8 * 400: exact in float32, rounded once in 16 bits.
    narrow = np.float16 if n > 1 else np.float32
    shifted = np.zeros_like(x)
    for source, target in shift(n):
        shifted[target] = x[source]
    same = {
        "psum": helpers.total(x),
        "all_reduce": helpers.total(x),
        "all_reduce_bf16": helpers.total(x.astype(jnp.bfloat16)).astype(jnp.bfloat16),
        "all_reduce_narrow": helpers.total(x).astype(narrow),
        "maximum": x.max(axis=0),
        "all_gather": x,
        "bruck_all_gather": x,
        "doubling_all_gather": x,
        "pull_channel": x[:, 0],
    }
    by_rank = {
        "all_to_all": x.swapaxes(0, 1),
        "push_channel": x.swapaxes(0, 1),
        "permute": shifted,
        "swap_channel": shifted[:, :1],
    }
    return same, by_rank


@every
def test_each_gives_what_numpy_says(n):
    results = helpers.run_ranks(
        lambda x: {name: program(x)[0] for name, program in programs(n).items()},
        inputs(n),
        n,
    )
    same, by_rank = expected(n)
    for name, wanted in (same | by_rank).items():
        found = results[name]
        if name in same:
            helpers.assert_same_on_all_ranks(found)
            found = found[0]
        sixteen = name == "all_reduce_bf16"
        assert (found.dtype == jnp.bfloat16) == sixteen, name
        found = found.view(np.float32) if found.dtype == np.uint32 else found
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.parametrize("platform", ["cpu", *helpers.slow("cuda")])
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_returned_are_those_of_the_program(name, platform):
    for n in RANKS:
        told = []
        found = traced(name, n, told, platform)
        assert told[-1] == pytest.approx(sum(helpers.sent_bytes(c, n) for c in found))
        # Over one rank only a permutation says that it sends: it counts its operand.
        assert (told[-1] > 0) == (n > 1 or name in ALONE)


def test_a_pull_is_one_all_to_all_on_cpus_and_one_all_gather_elsewhere():
    """Each in what is compiled for it, and nowhere both; 7/8 of 192 bytes, or 7 of 24."""
    gathered = traced("pull_channel", 8, platform="cuda")
    assert gathered == [Collective("all_gather", 24)]
    copied = traced("pull_channel", 8, platform="cpu")
    assert [helpers.sent_bytes(c, 8) for c in (*gathered, *copied)] == [168, 168]
    pull = jax.jit(helpers.stacked(lambda x: sent(channels.pull(WIRE), x[:1])[0], 8))
    for platform, meant, other in (
        ("cpu", "all_to_all", "all_gather"),
        ("cuda", "all_gather", "all_to_all"),
    ):
        with helpers.every_platform():
            program = pull.trace(inputs(8))
        lowered = program.lower(lowering_platforms=(platform,)).as_text()
        assert lowered.count(f"stablehlo.{meant}") == 1
        assert f"stablehlo.{other}" not in lowered


@pytest.mark.parametrize(("n", "x64"), [(2, False), (3, False), (2, True)])
def test_long_messages_go_both_ways_at_once_on_cpus_and_arrive_alike(n, x64):
    """A push, a pull and a swap, on both sides of the length that decides."""
    pairs = tuple((source, (source + 1) % n) for source in range(n))

    def run(rows):
        three = [channels.push(WIRE), channels.pull(WIRE), channels.swap(WIRE, [pairs])]
        given = (rows, rows[:1], rows[:1])
        done = [channel.send(x) for channel, x in zip(three, given, strict=True)]
        return [channel.received(y) for channel, y in zip(three, done, strict=True)]

    for words in (channels._LONG // 4 - 1, channels._LONG // 4):
        names = ["all_to_all", "all_to_all", "ppermute"]
        if words == channels._LONG // 4:
            names[1] = "all_gather"
            names = ["psum"] * 3 if n == 2 else names
        x = np.random.default_rng(words).integers(0, 1 << 32, (n, n, words), np.uint32)
        with jax.enable_x64(x64):
            pushed, pulled, swapped = helpers.run_ranks(run, x, n)
        np.testing.assert_array_equal(pushed, np.swapaxes(x, 0, 1))
        np.testing.assert_array_equal(pulled, np.stack([x[:, 0]] * n))
        np.testing.assert_array_equal(swapped[:, 0], np.roll(x[:, 0], 1, axis=0))
        told = helpers.traced_collectives(run, x, n)
        assert [one.name for one in told] == names
        counted = [4 * words * times for times in (n - 1, n - 1, 1)]
        assert [helpers.sent_bytes(one, n) for one in told] == counted
        told = helpers.traced_collectives(run, x, n, platform="cuda")
        assert [one.name for one in told] == ["all_to_all", "all_gather", "ppermute"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32"])
def test_a_long_swap_between_two_ranks_keeps_every_bit(dtype):
    """A sum of floats would keep neither the sign of zeros nor the payload of NaNs."""
    size = channels._LONG // np.dtype(jnp.dtype(dtype)).itemsize + 1
    octets = np.random.default_rng(0).integers(0, 256, (2, size * 8), np.uint8)
    x = octets.view(jnp.dtype(dtype))[:, :size]
    x[:, :3] = np.array([-0.0, 0.0, 1.0]).astype(x.dtype)
    with jax.enable_x64(dtype == "float64"):
        swap = lambda x: channels.swap(WIRE, [((0, 1), (1, 0))]).send(x)
        swapped = helpers.run_ranks(swap, x, 2)
        names = [one.name for one in helpers.traced_collectives(swap, x, 2)]
    assert swapped.tobytes() == x[::-1].tobytes()
    assert names == ["ppermute" if dtype == "int32" else "psum"]


def test_sums_are_not_scattered_by_gloo():
    """Its reduce-scatter gives rank 0 other numbers now and then, and no error."""
    x = np.random.default_rng(0).integers(-9, 9, (3, 3, 8)).astype(np.float32)
    scatter = lambda x: WIRE.reduce_scatter(x)[0]
    np.testing.assert_array_equal(helpers.run_ranks(scatter, x, 3), x.sum(0))
    for platform, name in (("cpu", "all_to_all"), ("cuda", "reduce_scatter")):
        told = helpers.traced_collectives(scatter, x, 3, platform=platform)
        assert [one.name for one in told] == [name]


def test_a_pull_over_two_axes_or_over_one_of_two_brings_the_rows_in_order():
    """It is the same over the axes that it goes over, and over no other."""
    mesh = helpers.grid(data=4, model=2)
    x = np.arange(8 * COLUMNS, dtype=np.uint32).reshape(8, COLUMNS)

    def run(axis_name):
        def on_rank(message):
            channel = channels.pull(wire.Wire(axis_name))
            return channel.received(channel.send(message))

        both = P((AXIS, "model"))
        kept = P() if isinstance(axis_name, tuple) else P("model")
        return jax.jit(
            helpers.shard_map(on_rank, mesh=mesh, in_specs=both, out_specs=kept)
        )(x)

    everything = run((AXIS, "model"))
    for shard in everything.addressable_shards:
        np.testing.assert_array_equal(shard.data, x)
    columns = run(AXIS)
    for shard in columns.addressable_shards:
        _, column = np.argwhere(mesh.devices == shard.device)[0]
        np.testing.assert_array_equal(shard.data, x[column::2])


@every
def test_what_was_summed_or_gathered_is_typed_as_replicated(n):
    replicated = ("psum", "all_reduce", "maximum", "all_gather", "pull_channel")
    for name, program in programs(n).items():
        same = helpers.is_replicated(lambda x, run=program: run(x)[0], inputs(n), n)
        assert same == name.startswith(replicated), name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_numbers_of_16_bits_are_added_up_in_32(dtype):
    # An eighth of a unit in the last place of 1: added up one by one in 16 bits, 1 stays 1.
    small = float(jnp.finfo(dtype).eps) / 8
    x = np.full((8, 5), small).astype(dtype)
    x[3] = 1
    # 7 eighths are rounded to the next number above 1.
    expected = np.full(5, 1 + 8 * small).astype(dtype)
    one_by_one = x[3]
    for row in x[[0, 1, 2, 4, 5, 6, 7]]:
        one_by_one = one_by_one + row
    assert (one_by_one == 1).all()
    found = helpers.run_ranks(lambda x: WIRE.all_reduce(x)[0], x, 8)
    helpers.assert_same_on_all_ranks(found)
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_the_cost_of_an_all_reduce_is_known_and_sizes_are_padded(size, dtype):
    told = []

    def run(x):
        result, sent = WIRE.all_reduce(x)
        told.append(sent)
        return result

    x = np.arange(3 * size).reshape(3, size).astype(dtype)
    found = helpers.traced_collectives(run, x, 3)
    cost = wire.all_reduce_cost(size, dtype, None, 3)
    assert cost == pytest.approx(sum(helpers.sent_bytes(c, 3) for c in found))
    assert cost == pytest.approx(told[0])
    # On Explicit axes JAX gives each device all of an array without elements.
    mesh = helpers.auto(helpers.mesh_of(3)) if size == 0 else None
    total = helpers.run_ranks(run, x, 3, mesh=mesh)
    np.testing.assert_array_equal(total, np.stack([helpers.total(x)] * 3))


def test_numbers_never_travel_wider_than_they_are():
    """A wire dtype narrows; asked to widen, it leaves them as they are."""
    assert wire.travelling(jnp.float32, None) == jnp.float32
    assert wire.travelling(jnp.float32, jnp.bfloat16) == jnp.bfloat16
    assert wire.travelling(jnp.bfloat16, jnp.float32) == jnp.bfloat16
    x = np.ones((3, 5), jnp.bfloat16)
    run = lambda x: WIRE.narrowed(jnp.float32).all_reduce(x)[0]
    found = helpers.traced_collectives(run, x, 3)
    # Two of the five numbers a part, and so six in all: added up in float32, not by psum.
    assert [(c.name, c.bytes) for c in found] == [("all_to_all", 12), ("all_gather", 4)]
