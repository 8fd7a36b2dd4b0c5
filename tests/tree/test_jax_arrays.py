"""Trees of JAX arrays in a `GradSync`: values, memory, mistakes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fddp
from fddp.averaging import average
from fddp.native import extension
from fddp.tree import jax_arrays
from fddp.tree.foreign import holds_foreign, to_array, to_tensor
from tests.support.groups import rank_of
from tests.support.ranks import Launch, run_fresh

WORLD_SIZE = 2


def params() -> dict[str, Any]:
    """Sizes of which some are no multiple of 64 bytes; one leaf of integers, one that is None."""
    return {
        "weight": jnp.arange(64.0).reshape(4, 16),
        "bias": jnp.ones(10),
        "scale": jnp.array(3.0),
        "half": jnp.ones((2, 16), jnp.bfloat16),
        "step": jnp.arange(3),
        "none": None,
    }


def plain(tree: Any) -> Any:
    """JAX arrays as NumPy arrays, which can be sent to the test."""
    return jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.float32)), tree)


def own_grads(rank: int) -> Any:
    return jax.tree.map(
        lambda leaf: leaf * (1 + rank) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf,
        params(),
    )


def test_the_mean_of_jax_arrays() -> None:
    check_means(fddp.loopback(WORLD_SIZE, mean_on_rank))


@pytest.mark.parametrize("launch", ["c10d", "shm"], indirect=True)
def test_on_processes(launch: Launch) -> None:
    """Means, arrays from the memory of buckets, operators, and libraries that meet."""
    check_means(launch(WORLD_SIZE, mean_on_rank))
    for places in launch(WORLD_SIZE, places_on_rank):
        # Buckets hold leaves of whole multiples of 64 bytes first, and then "scale", of 4 bytes.
        assert [name for name, shared in places.items() if not shared] == ["bias"]
    check_operators(launch(WORLD_SIZE, operators_on_rank))
    check_mixed(launch(WORLD_SIZE, mixed_on_rank))


def check_means(results: Any) -> None:
    for tree, grad_norm in results:
        assert tree["step"] is None
        assert tree["none"] is None
        for name in ("weight", "bias", "scale", "half"):
            np.testing.assert_array_equal(tree[name], 1.5 * plain(params())[name])
        squares = sum(np.sum(np.square(leaf)) for leaf in tree.values() if leaf is not None)
        assert grad_norm == pytest.approx(np.sqrt(squares))


def mean_on_rank(group: Any) -> Any:
    with fddp.GradSync(params(), group=group) as sync:
        grads = own_grads(sync.rank)
        before = plain(grads)
        tree, info = sync(grads, with_info=True)
        kinds = {type(leaf) for leaf in tree.values() if leaf is not None}
        assert kinds == {type(grads["weight"])}, kinds
        for name, leaf in tree.items():
            if leaf is not None:
                assert (leaf.dtype, leaf.shape) == (grads[name].dtype, grads[name].shape)
        jax.tree.map(np.testing.assert_array_equal, plain(grads), before)
        return plain(tree), info.grad_norm


def test_same_bits_as_tensors() -> None:
    for ours, theirs in fddp.loopback(WORLD_SIZE, both_on_rank):
        for name, array in ours.items():
            assert array.tobytes() == theirs[name].tobytes(), name


def both_on_rank(group: Any) -> Any:
    rng = np.random.default_rng(rank_of(group))
    grads = {f"l{i}": rng.standard_normal((i + 1, 7)).astype(np.float32) for i in range(9)}
    tensors = jax.tree.map(torch.from_numpy, grads)
    with fddp.GradSync(tensors, group=group) as sync:
        means = sync(tensors, weight=1.0 + sync.rank)
    arrays_ = jax.tree.map(jnp.asarray, grads)
    with fddp.GradSync(arrays_, group=group) as sync:
        ours = sync(arrays_, weight=1.0 + sync.rank)
    return plain(ours), {name: leaf.numpy() for name, leaf in means.items()}


def test_virtual_ranks_have_the_bits_of_tensors() -> None:
    def trees(number: int) -> Any:
        rng = np.random.default_rng(number)
        return {f"l{i}": rng.standard_normal((i + 1, 7)).astype(np.float32) for i in range(5)}

    def mean(group: Any, kind: Callable[..., Any]) -> Any:
        with fddp.GradSync(jax.tree.map(kind, trees(0)), group=group, virtual_ranks=5) as sync:
            grads = sync.virtual_batches(lambda number: jax.tree.map(kind, trees(number)))
            weights = [1.0 + number for number in sync.carried_ranks]
            return jax.tree.map(np.asarray, sync(grads, weight=weights))

    (due,) = fddp.loopback(1, mean, torch.from_numpy)
    for ranks in (1, 2, 3):
        for found in fddp.loopback(ranks, mean, jnp.asarray):
            for name, array in found.items():
                assert array.tobytes() == due[name].tobytes(), name


def places_on_rank(group: Any) -> dict[str, bool]:
    leaves = {"a": jnp.ones((4, 16)), "bias": jnp.ones(10), "scale": jnp.array(1.0)}
    leaves |= {"b": jnp.ones(16), "c": jnp.ones((3, 32))}
    handed: dict[int, int] = {}  # by address of the array: of the tensor
    array_of = jax_arrays._importer()

    def noted(capsule: Any, device: Any, stream: None) -> Any:
        tensor = torch._C._from_dlpack(capsule)
        array = array_of(torch._C._to_dlpack(tensor), device, stream)
        handed[array.unsafe_buffer_pointer()] = tensor.data_ptr()
        return array

    with fddp.GradSync(leaves, group=group) as sync:
        with mock.patch.object(jax_arrays, "_importer", return_value=noted):
            tree = sync(leaves)
        assert len(handed) == len(leaves)
        places = {name: leaf.unsafe_buffer_pointer() for name, leaf in tree.items()}
        return {name: handed[place] == place for name, place in places.items()}


def test_gradients_are_not_copied_on_the_way_in() -> None:
    leaves = [jnp.ones((4, 16)), jnp.ones(10), jnp.array(1.0), jnp.ones(3, jnp.bfloat16)]
    tensors = jax_arrays.to_tensors(leaves, ["a", "b", "c", "d"], "gradients")
    for leaf, tensor in zip(leaves, tensors, strict=True):
        assert tensor.data_ptr() == leaf.unsafe_buffer_pointer()


def test_memory_is_reused_once_jax_releases_it() -> None:
    (addresses,) = fddp.loopback(1, addresses_on_rank)
    first, held, free = addresses
    assert held != first
    assert free in (first, held)


def addresses_on_rank(group: Any) -> list[int]:
    tree = {"w": jnp.ones((256, 16))}
    reader = jax.jit(lambda x: x * 2)
    with fddp.GradSync(tree, group=group) as sync:
        first = sync(tree)["w"]
        addresses = [first.unsafe_buffer_pointer()]
        held = sync(jax.tree.map(lambda leaf: leaf + 1, tree))["w"]
        addresses.append(held.unsafe_buffer_pointer())
        read = reader(held)  # may still run when `held` is dropped
        np.testing.assert_array_equal(first, np.ones((256, 16)))
        del first, held
        gc.collect()
        read.block_until_ready()
        again = sync(jax.tree.map(lambda leaf: leaf + 2, tree))["w"]
        addresses.append(again.unsafe_buffer_pointer())
        np.testing.assert_array_equal(read, np.full((256, 16), 4.0))
        return addresses


def test_jax_holds_the_bucket() -> None:
    bucket = torch.zeros(64)
    layout = fddp.native.layout.Layout((0,), ((64,),), ((1,),), 64)
    (result,) = fddp.native.pack.slices(bucket, layout)
    array = to_array(result)
    del result
    assert extension.compiled.storage_use_count(bucket) == 2
    del array
    assert extension.compiled.storage_use_count(bucket) == 1


def test_single_arrays_and_tensors() -> None:
    tensor = torch.randn(4, 16, requires_grad=True)
    array = to_array(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(to_tensor(array), tensor.detach())
    transposed = to_array(tensor.T)
    np.testing.assert_array_equal(transposed, tensor.detach().T)
    conjugate = to_array(torch.tensor([1j]).conj())
    assert conjugate.tolist() == [-1j]
    doubles = torch.ones(16, dtype=torch.float64)
    assert to_array(doubles).dtype == jnp.float32
    with jax.enable_x64(True):
        assert to_array(doubles).dtype == jnp.float64
    for other in (torch.ones(2, device="meta"), torch.ones(2).to_sparse()):
        with pytest.raises(ValueError, match="to_array takes dense tensors in CPU memory"):
            to_array(other)


def test_donated_results_are_not_written() -> None:
    tensor = torch.zeros(64)
    array = to_array(tensor)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array).block_until_ready()
    assert tensor.eq(0).all()


def test_every_dtype_is_reduced() -> None:
    with jax.enable_x64():
        names = ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
        for results in fddp.loopback(WORLD_SIZE, dtypes_on_rank, names):
            assert results == {name: (name, 1.5) for name in names}


def dtypes_on_rank(group: Any, names: list[str]) -> dict[str, tuple[str, float]]:
    with jax.enable_x64():
        tree = {name: jnp.ones(3, name) for name in names}
        with fddp.GradSync(tree, group=group) as sync:
            mean = sync({name: leaf * (1 + sync.rank) for name, leaf in tree.items()})
        return {name: (leaf.dtype.name, float(leaf[1].real)) for name, leaf in mean.items()}


def test_ranks_without_gradients_get_arrays() -> None:
    for mean, kind in fddp.loopback(WORLD_SIZE, missing_on_rank):
        assert kind
        np.testing.assert_array_equal(mean, np.full(3, 0.5))


def missing_on_rank(group: Any) -> Any:
    with fddp.GradSync({"w": jnp.ones(3)}, group=group) as sync:
        mean = sync({"w": jnp.ones(3) if sync.rank else None})["w"]
        return np.asarray(mean), isinstance(mean, jax.Array)


def test_gradients_of_integers_are_none() -> None:
    def train(group: Any) -> Any:
        tree = {"w": jnp.ones(3), "n": jnp.arange(3)}
        grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)(tree)
        assert grads["n"].dtype == jax.dtypes.float0
        with fddp.GradSync(tree, group=group) as sync:
            return sync(grads)["n"]

    assert fddp.loopback(1, train) == [None]


def test_shards() -> None:
    for shard, whole, own in fddp.loopback(WORLD_SIZE, shards_on_rank):
        assert all(leaf.ndim == 1 for leaf in shard.values())
        np.testing.assert_array_equal(whole["weight"], 1.5 * np.arange(64.0).reshape(4, 16))
        np.testing.assert_array_equal(shard["weight"], 1.5 * own["weight"])


def shards_on_rank(group: Any) -> Any:
    tree = {"weight": jnp.arange(64.0).reshape(4, 16), "bias": jnp.ones(10)}
    with fddp.GradSync(tree, group=group, algorithm="reduce_scatter") as sync:
        shard = sync.reduce_scatter(jax.tree.map(lambda leaf: leaf * (1 + sync.rank), tree))
        whole = sync.all_gather(shard)
        own = sync.shard(tree)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((shard, whole, own)))
        return plain(shard), plain(whole), plain(own)


def test_broadcast_and_averages() -> None:
    for sent, mean in fddp.loopback(WORLD_SIZE, sent_on_rank):
        assert sent == {"i": [1, 2, 3], "b": [1.0, 1.0]}
        assert mean == [0.0, 0.5, 1.0]


def sent_on_rank(group: Any) -> Any:
    rank = rank_of(group)
    tree = {"i": jnp.arange(3) + rank, "b": jnp.ones(2, jnp.bfloat16) * rank, "n": None}
    sent = fddp.broadcast(tree, 1, group=group)
    assert sent.pop("n") is None
    mean = average({"w": jnp.arange(3.0) * rank}, group=group)["w"]
    assert isinstance(mean, jax.Array)
    return {name: leaf.tolist() for name, leaf in sent.items()}, mean.tolist()


def test_operators_outside_of_programs() -> None:
    check_operators(fddp.loopback(WORLD_SIZE, operators_on_rank))


def check_operators(results: Any) -> None:
    for mean, total, gathered, own in results:
        np.testing.assert_array_equal(mean["w"], np.full(3, 0.5))
        assert total == [1, 3]
        np.testing.assert_array_equal(gathered, [[0.0, 0.0], [1.0, 1.0]])
        assert own == "TransformError"


def operators_on_rank(group: Any) -> Any:
    rank = rank_of(group)
    mean = fddp.pmean({"w": jnp.ones(3) * rank, "n": None}, group)
    total = fddp.psum(jnp.arange(2) + jnp.array([0, 1]) * rank + jnp.array([rank, 0]), group)
    gathered = fddp.all_gather(jnp.ones(2) * rank, group)
    assert all(isinstance(leaf, jax.Array) for leaf in (mean["w"], total, gathered))
    with pytest.raises(fddp.FddpError) as raised:
        jax.jit(lambda x: fddp.pmean(x, group))(jnp.ones(3))
    return plain(mean), total.tolist(), np.asarray(gathered), type(raised.value).__name__


def test_hooks_with_state() -> None:
    def train(group: Any) -> Any:
        grads = {"w": jnp.array([4.0, 3.0])}
        with fddp.GradSync(grads, group=group, hook=fddp.hooks.top_k(0.5)) as sync:
            first, state = sync.update(grads, sync.init_state())
            second, state = sync.update(grads, state)
            return first["w"].tolist(), second["w"].tolist()

    assert fddp.loopback(2, train) == [([4.0, 0.0], [0.0, 6.0])] * 2


def test_one_rank_of_tensors_and_one_of_arrays() -> None:
    check_mixed(fddp.loopback(WORLD_SIZE, mixed_on_rank))


def check_mixed(results: Any) -> None:
    for rank, (kind, mean) in enumerate(results):
        assert kind == ("ArrayImpl" if rank else "Tensor")
        np.testing.assert_array_equal(mean, np.full((4, 16), 1.5, np.float32))


def mixed_on_rank(group: Any) -> Any:
    rank = rank_of(group)
    ones: Any = jnp.ones if rank else torch.ones
    tree = {"w": ones((4, 16)), "b": ones(3)}
    with fddp.GradSync(tree, group=group) as sync:
        mean = sync({name: leaf * (1 + rank) for name, leaf in tree.items()})
        return type(mean["w"]).__name__, np.asarray(mean["w"])


def test_public_functions_serve_where_jaxlib_hides_its_own() -> None:
    with mock.patch.object(jax_arrays, "_native", return_value=None):
        for outcome in fddp.loopback(2, mean_on_rank):
            np.testing.assert_array_equal(outcome[0]["bias"], np.full(10, 1.5))


# Mistakes: each is made on rank 1, is raised on all ranks, and leaves the group usable.

MISTAKES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "float8": (
        lambda w: w.astype(jnp.float8_e4m3fn),
        "TreeMismatchError",
        "leaf 'w' of the gradients is of dtype float8_e4m3fn, which torch lacks or cannot import "
        "from JAX; cast it, or pass None there",
    ),
    "int4": (lambda w: w.astype(jnp.int4), "TreeMismatchError", "is of dtype int4, which torch"),
    "key": (
        lambda w: jax.random.key(0),
        "TreeMismatchError",
        "leaf 'w' of the gradients is an array of key<fry>, which torch lacks; pass None there, or "
        "jax.random.key_data(key)",
    ),
    "shape": (
        lambda w: w[0],
        "TreeMismatchError",
        "leaf 'w' of the gradients is float32 of shape (16,) where the plan has float32 of shape "
        "(4, 16)",
    ),
    "dtype": (
        lambda w: w.astype(jnp.float16),
        "TreeMismatchError",
        "is float16 of shape (4, 16) where the plan has float32 of shape (4, 16)",
    ),
    "NumPy": (
        np.asarray,
        "TreeMismatchError",
        "leaf 'w' of the gradients is a ndarray; pass a tensor or None",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_on_one_rank(mistake: str) -> None:
    make, kind, text = MISTAKES[mistake]

    def train(group: Any) -> Any:
        good = {"w": jnp.ones((4, 16))}
        with fddp.GradSync(good, group=group) as sync:
            bad = {"w": make(good["w"])} if group.rank else good
            with pytest.raises(fddp.FddpError) as raised:
                sync(bad)
            np.testing.assert_array_equal(sync(good)["w"], np.ones((4, 16)))
        return type(raised.value).__name__, str(raised.value)

    (on_0, text_0), (on_1, text_1) = fddp.loopback(2, train)
    assert (on_0, on_1) == ("PeerError", kind)
    assert text in text_1
    assert text in text_0
    assert "rank 1" in text_0


def attempts(group: Any) -> list[tuple[str, str]]:
    good = {"w": jnp.ones((4, 16))}
    outcomes = []
    with fddp.GradSync(good, group=group) as sync:
        for attempt in (
            lambda: jax.jit(sync)(good),
            lambda: jax.grad(lambda tree: sync(tree)["w"].sum())(good),
            lambda: jax.jit(lambda x: x + sync(good)["w"])(1.0),
            lambda: jax.lax.cond(False, lambda: sync(good)["w"], lambda: good["w"]),
            lambda: jax.jit(lambda x: x + fddp.pmean(good, group)["w"])(1.0),
            lambda: sync.reduce_(good),
            lambda: sync.value_and_grad(lambda tree: tree["w"].sum())(good),
            lambda: sync.donate(sync(good)),
            lambda: fddp.broadcast({"k": jax.random.key(0)}, group=group),
        ):
            with pytest.raises(fddp.FddpError) as raised:
                attempt()
            outcomes.append((type(raised.value).__name__, str(raised.value)))
        sync(good)
    return outcomes


def test_unsupported_uses_of_arrays_are_refused() -> None:
    (
        (jitted, in_jit),
        (graded, in_grad),
        *around,
        (written, in_place),
        (differentiated, torch_grad),
        (donated, donation),
        (sent, key),
    ) = fddp.loopback(1, attempts)[0]
    assert jitted == graded == "TransformError"
    assert "leaf 'w' of the gradients is traced by JAX (DynamicJaxprTracer)" in in_jit
    assert "use fddp.jax.pmean or grad_sync, which work inside" in in_grad
    for kind, text in around:
        assert kind == "TransformError"
        assert "has a value, but JAX traces the function around this call" in text
    assert written == differentiated == donated == "TreeMismatchError"
    assert "arrays of JAX can't be written; call sync(grads), which returns new ones" in in_place
    assert "loss, grads = jax.value_and_grad(loss_fn)(params), then grads = sync(grads)" in (
        torch_grad
    )
    assert "leaf 'w' (bucket 0) of the donated gradients is a JAX array" in donation
    assert sent == "PlanMismatchError"
    assert "leaf 'k' of the tree is an array of key<fry>" in key


def sync_of_known_values(group: Any) -> list[list[float]]:
    grads = {"w": jnp.full(2, 2.0 * group.rank)}
    with fddp.GradSync(grads, group=group) as sync:

        @jax.jit
        def early(x: Any) -> Any:
            with jax.ensure_compile_time_eval():
                return x + sync(grads)["w"]

        results = [early(0.0), jax.grad(lambda x: (x * sync(grads)["w"]).sum())(jnp.ones(2))]
        return [result.tolist() for result in results]


def test_a_sync_while_jax_evaluates() -> None:
    assert fddp.loopback(2, sync_of_known_values) == [[[1.0, 1.0]] * 2] * 2


def test_arrays_elsewhere() -> None:
    # The number of devices can't be changed once JAX has run.
    (outcome,) = run_fresh(1, devices_on_rank)
    assert outcome.error is None, outcome.error
    spread, elsewhere, second = outcome.result
    assert "leaf 'w' of the gradients is spread over 2 devices of this process" in spread
    assert "(cpu:0, cpu:1); reduce over these within JAX" in spread
    assert "lies on made up (platform 'tpu'), and fddp takes JAX arrays in CPU" in elsewhere
    assert second == "cpu:1"


def devices_on_rank(rank: int, world_size: int) -> tuple[str, str, str]:
    jax.config.update("jax_num_cpu_devices", 2)
    tree = {"w": jnp.ones((4, 16))}
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    made_up = mock.Mock(platform="tpu", __str__=lambda self: "made up")
    with fddp.GradSync(tree) as sync:
        with pytest.raises(fddp.TreeMismatchError) as spread:
            sync(jax.device_put(tree, sharding))
        with (
            mock.patch.object(type(tree["w"]), "devices", return_value={made_up}),
            pytest.raises(fddp.TreeMismatchError) as elsewhere,
        ):
            sync(tree)
        second = sync(jax.device_put(tree, jax.devices()[1]))["w"]
        assert second.tolist() == tree["w"].tolist()
    on_both = [jax.device_put(jnp.ones(2), device) for device in jax.devices()]
    assert [mean.device for mean in fddp.pmean(on_both)] == jax.devices()
    return str(spread.value), str(elsewhere.value), str(second.device)


def test_trees_of_tensors_have_no_foreign_leaves() -> None:
    assert not holds_foreign([torch.ones(1), None, np.ones(1)])
    assert holds_foreign([torch.ones(1), None, jnp.ones(1)])


def test_unready_gradients_are_waited_for() -> None:
    def slow(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ y.T / 300), x)

    x = jnp.eye(300) + 0.5
    expected = np.asarray(jax.jit(slow)(x))

    def train(group: Any) -> Any:
        tree = {"w": x}
        with fddp.GradSync(tree, group=group) as sync:
            return np.asarray(sync({"w": jax.jit(slow)(x)})["w"])

    np.testing.assert_array_equal(fddp.loopback(1, train)[0], expected)


@pytest.mark.parametrize(
    "tensor", [torch.arange(10.0)[::2], torch.ones(1).expand(5), torch.ones(4, 6)[:, 1:3].T]
)
def test_tensors_with_gaps_become_arrays(tensor: torch.Tensor) -> None:
    assert to_array(tensor).tolist() == tensor.tolist()


def test_integers_that_do_not_fit_are_refused() -> None:
    assert to_array(torch.tensor([3, -4])).tolist() == [3, -4]
    with pytest.raises(ValueError, match=r"from 1 to 1099511627776, which int32 can't hold"):
        to_array(torch.tensor([1, 2**40]))
