"""Server aggregators: properties over random payloads, and small cases worked out by hand."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fczoo import Tree
from fczoo.aggregate import ENVELOPE, collect_rows, fedavg, keep_latest, prototype_reweight, prototype_weights, sort_by_usage, uniform
from fczoo.core import drop, select
from fczoo.registry import AGGREGATORS

some = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31)
clients = st.integers(1, 6)
MEANS = {"fedavg": fedavg, "uniform": uniform}


def rng_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def envelope(client: int, samples: int) -> Tree:
    return {"num_samples": torch.tensor(samples), "client": torch.tensor(client)}


def random_payloads(count: int, seed: int, own: Callable[[torch.Generator], Tree] = lambda rng: {}) -> list[Tree]:
    """``count`` uploads of a head and a prompt, with what ``own`` adds."""
    rng = rng_of(seed)
    samples = torch.randint(1, 200, (count,), generator=rng).tolist()
    return [{"head": normal(rng, 4, 3), "prompt": normal(rng, 5), **own(rng), **envelope(k, samples[k])} for k in range(count)]


def copy(payloads: Sequence[Tree]) -> list[Tree]:
    return [{k: v.clone() for k, v in p.items()} for p in payloads]


def same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- what every registered aggregator has to keep


def prototypes(rng: torch.Generator) -> Tree:
    counts = torch.randint(0, 3, (4,), generator=rng)
    return {"prototype": normal(rng, 4, 6), "class.count": counts.double(), "class.mean": normal(rng, 4, 6) * (counts > 0)[:, None]}


def gaussian_rows(rng: torch.Generator) -> Tree:
    held = int(torch.randint(0, 4, (), generator=rng))
    labels = torch.randperm(6, generator=rng)[:held]
    return {"gauss.label": labels, "gauss.count": labels.double() + 1, "gauss.mean": normal(rng, held, 3), "gauss.var": normal(rng, held, 3).abs()}


def prototype_rows(rng: torch.Generator) -> Tree:
    held = int(torch.randint(0, 4, (), generator=rng))
    return {"local.label": torch.randperm(6, generator=rng)[:held], "local.mean": normal(rng, held, 3)}


def prompt_pool(rng: torch.Generator) -> Tree:
    usage = torch.randint(0, 4, (5,), generator=rng).double()
    return {"usage": usage, "pool.key": normal(rng, 5, 3), "pool.prompt": normal(rng, 5, 2, 3)}


OWN: dict[str, Callable[[torch.Generator], Tree]] = {
    "fedavg": lambda rng: {},
    "uniform": lambda rng: {},
    "prototype_reweight": prototypes,
    "gaussian_mixture": gaussian_rows,
    "prototype_pool": prototype_rows,
    "sort_by_usage": prompt_pool,
}
AVERAGE = {"sort_by_usage": "uniform", "uniform": "uniform"}  # the others weight by sample counts
names = pytest.mark.parametrize("name", AGGREGATORS.names("fczoo.aggregate"))


def test_every_aggregator_has_payloads_here() -> None:
    assert set(AGGREGATORS.names("fczoo.aggregate")) == OWN.keys()


@names
@some
@given(clients, seeds)
def test_pure_and_without_envelope(name: str, count: int, seed: int) -> None:
    payloads = random_payloads(count, seed, OWN[name])
    before = copy(payloads)
    first, second = AGGREGATORS.get(name)(payloads), AGGREGATORS.get(name)(payloads)
    assert len(payloads) == count and all(map(same, payloads, before))
    assert same(first, second)
    assert not first.keys() & {*ENVELOPE}
    for part in ("head", "prompt"):
        assert first[part].data_ptr() not in {p[part].data_ptr() for p in payloads}  # no view of an upload


@names
@some
@given(clients, seeds, seeds)
def test_averaged_part(name: str, count: int, seed: int, shuffle: int) -> None:
    """What has no special meaning is averaged, inside the hull of the inputs, whatever the order of the clients."""
    payloads = random_payloads(count, seed, OWN[name])
    n = torch.tensor([int(p["num_samples"]) for p in payloads], dtype=torch.float64)
    weights = torch.full((count,), 1 / count, dtype=torch.float64) if name in AVERAGE else n / n.sum()
    merged = AGGREGATORS.get(name)(payloads)
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    shuffled = AGGREGATORS.get(name)([payloads[i] for i in order])
    for part in ("head", "prompt"):
        stacked = torch.stack([p[part] for p in payloads])
        assert close(merged[part], torch.einsum("k,k...->...", weights, stacked))
        assert close(merged[part], shuffled[part])
        assert (merged[part] >= stacked.amin(0) - 1e-12).all() and (merged[part] <= stacked.amax(0) + 1e-12).all()


@names
@some
@given(clients, seeds)
def test_identical_clients_change_nothing(name: str, count: int, seed: int) -> None:
    one = random_payloads(1, seed, OWN[name])[0]
    merged = AGGREGATORS.get(name)([{**one, **envelope(k, 3 * k + 1)} for k in range(count)])
    assert close(merged["head"], one["head"]) and close(merged["prompt"], one["prompt"])
    if name == "prototype_reweight":
        assert close(merged["prototype"], one["prototype"])


# ---------------------------------------------------------------- means


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_single_client_is_returned(mean: Callable) -> None:
    payload = {"x": torch.tensor([1.5, -2.0]), **envelope(7, 12)}
    assert mean([payload])["x"].tolist() == [1.5, -2.0]


def test_two_client_means_by_hand() -> None:
    # n = 1 and 3: weights 1/4 and 3/4. x: 1/4 * 0 + 3/4 * 4 = 3 and 1/4 * 8 + 3/4 * 0 = 2. Plainly: 2 and 4.
    payloads = [{"x": torch.tensor([0.0, 8.0]), **envelope(0, 1)}, {"x": torch.tensor([4.0, 0.0]), **envelope(1, 3)}]
    assert fedavg(payloads)["x"].tolist() == [3.0, 2.0]
    assert uniform(payloads)["x"].tolist() == [2.0, 4.0]


def test_means_keep_the_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        payloads = [{"x": torch.ones(2, dtype=dtype) * k, **envelope(k, 1)} for k in range(3)]
        for mean in MEANS.values():
            assert mean(payloads)["x"].dtype == dtype and mean(payloads)["x"].tolist() == [1.0, 1.0]


@some
@given(clients, seeds, st.integers(1, 50))
def test_fedavg_depends_on_shares_only(count: int, seed: int, factor: int) -> None:
    payloads = random_payloads(count, seed)
    scaled = [{**p, "num_samples": p["num_samples"] * factor} for p in payloads]
    assert close(fedavg(payloads)["head"], fedavg(scaled)["head"])
    equal = [{**p, "num_samples": torch.tensor(factor)} for p in payloads]
    assert close(fedavg(equal)["head"], uniform(payloads)["head"])


@some
@given(st.integers(2, 6), seeds)
def test_fedavg_of_merged_clients(count: int, seed: int) -> None:
    """Two clients with the same tensor are one client with their samples together."""
    payloads = random_payloads(count, seed)
    twin = [*payloads, {**payloads[0], "client": torch.tensor(count)}]
    merged = [{**payloads[0], "num_samples": 2 * payloads[0]["num_samples"]}, *payloads[1:]]
    assert close(fedavg(twin)["head"], fedavg(merged)["head"])


# ---------------------------------------------------------------- prototype re-weight


class Case:
    """Random prototypes, class means and who holds which class."""

    def __init__(self, count: int, classes: int, dim: int, seed: int):
        rng = rng_of(seed)
        self.local, self.means = normal(rng, count, classes, dim), normal(rng, count, classes, dim)
        self.present = torch.rand(count, classes, generator=rng) < 0.6

    def weights(self, temperature: float = 0.2, **changes: Tensor) -> Tensor:
        return prototype_weights(*({"local": self.local, "means": self.means, "present": self.present} | changes).values(), temperature)

    def closeness(self) -> Tensor:
        """p = 1/d, in plain loops."""
        count, classes, _ = self.local.shape
        p = torch.empty(count, classes, dtype=torch.float64)
        for k in range(count):
            for c in range(classes):
                d = sum(math.dist(self.local[k, c].tolist(), self.means[i, c].tolist()) for i in range(count) if self.present[i, c])
                p[k, c] = 1 / d if d else math.inf
        return p


cases = st.builds(Case, st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), seeds)
taus = st.floats(0.05, 5)


@some
@given(cases, taus)
def test_weights_are_a_softmax_of_closeness(case: Case, tau: float) -> None:
    weights, p = case.weights(tau), case.closeness()
    count = len(weights)
    assert (weights >= 0).all() and close(weights.sum(0), torch.ones(weights.shape[1], dtype=torch.float64))
    for c in range(weights.shape[1]):
        if not case.present[:, c].any() or p[:, c].max() - p[:, c].min() <= 1e-12 * p[:, c].max():  # nobody holds it, or all are as far
            assert close(weights[:, c], torch.full((count,), 1 / count, dtype=torch.float64))
            continue
        low, high = 1 / (1 + (count - 1) * math.exp(1 / tau)), math.exp(1 / tau) / (math.exp(1 / tau) + count - 1)
        assert (weights[:, c] >= low * (1 - 1e-9)).all() and (weights[:, c] <= high * (1 + 1e-9)).all()
        scaled = [(x - p[:, c].min()) / (p[:, c].max() - p[:, c].min()) for x in p[:, c]]
        powers = [math.exp(a / tau) for a in scaled]
        assert close(weights[:, c], torch.tensor([x / sum(powers) for x in powers], dtype=torch.float64), 1e-6)
        ranked = p[:, c].argsort()
        assert (weights[ranked, c].diff() >= -1e-12).all()  # the closer, the heavier
        assert weights[p[:, c].argmax(), c] >= weights[:, c].max() - 1e-12


@some
@given(cases, st.floats(0.1, 100), seeds)
def test_weights_do_not_see_scale_shift_or_rotation(case: Case, scale: float, seed: int) -> None:
    dim = case.local.shape[-1]
    rng = rng_of(seed)
    turn, shift = torch.linalg.qr(normal(rng, dim, dim)).Q, normal(rng, dim)
    for change in (lambda x: scale * x, lambda x: x + shift, lambda x: x @ turn):
        assert close(case.weights(local=change(case.local), means=change(case.means)), case.weights(), 1e-6)


@some
@given(cases, seeds)
def test_weights_follow_the_clients(case: Case, seed: int) -> None:
    order = torch.randperm(len(case.local), generator=rng_of(seed))
    shuffled = case.weights(local=case.local[order], means=case.means[order], present=case.present[order])
    assert close(shuffled, case.weights()[order], 1e-6)


@some
@given(cases)
def test_means_of_clients_without_the_class_do_not_count(case: Case) -> None:
    noise = torch.where(case.present[..., None], case.means, torch.full_like(case.means, 1e3))
    assert torch.equal(case.weights(means=noise), case.weights())


@some
@given(cases)
def test_weights_at_extreme_temperatures(case: Case) -> None:
    count = len(case.local)
    assert close(case.weights(1e9), torch.full_like(case.weights(), 1 / count), 1e-6)
    sharp, p = case.weights(1e-6), case.closeness()
    for c in range(p.shape[1]):
        second = p[:, c].sort(descending=True).values[1:2]
        if case.present[:, c].any() and count > 1 and second < p[:, c].max() * (1 - 1e-3):
            assert close(sharp[:, c], torch.nn.functional.one_hot(p[:, c].argmax(), count).double(), 1e-6)


def test_weights_where_no_client_is_closer() -> None:
    """Three corners of a cube seen from its diagonal: the same distance for all."""
    local = torch.eye(3, dtype=torch.float64)[:, None]
    for present in ([True, False, False], [True, True, True]):
        means = torch.zeros(3, 1, 3, dtype=torch.float64)
        assert prototype_weights(local, means, torch.tensor(present)[:, None])[:, 0].tolist() == [1 / 3] * 3


def test_weights_of_one_client_and_of_nobody() -> None:
    case = Case(1, 2, 3, 0)
    case.present[:] = torch.tensor([True, False])
    assert case.weights().tolist() == [[1.0, 1.0]]
    several = Case(4, 1, 3, 0)
    several.present[:] = False
    assert several.weights()[:, 0].tolist() == [0.25] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_at_distance_zero(dtype: torch.dtype) -> None:
    case = Case(3, 1, 4, 0)
    local, means = case.local.to(dtype), case.means.to(dtype)
    present = torch.tensor([[True], [False], [False]])
    local[2] = means[0]  # exactly on the only mean
    weights = prototype_weights(local, means, present)
    # p is about 1e12 against about 1, so the others rescale to 0: e^5 / (e^5 + 2) = 148.413 / 150.413 = 0.98670
    assert weights.isfinite().all() and weights[2, 0].item() == pytest.approx(0.98670, abs=1e-5)
    assert prototype_weights(means[:1].expand(3, -1, -1), means, present)[:, 0].tolist() == pytest.approx([1 / 3] * 3)  # all on it


def test_weights_of_three_clients_by_hand() -> None:
    # One class, D = 1, held by client 0 alone with mean 0; prototypes at 1, -2 and 4.
    # d = 1, 2, 4; p = 1, 1/2, 1/4; rescaled by (p - 1/4) / (3/4): 1, 1/3, 0.
    # tau = 0.2: e^5 = 148.4132, e^(5/3) = 5.2945, e^0 = 1; sum 154.7077; weights 0.95931, 0.03422, 0.00646.
    local = torch.tensor([[[1.0]], [[-2.0]], [[4.0]]])
    means = torch.tensor([[[0.0]], [[9.0]], [[9.0]]])
    present = torch.tensor([[True], [False], [False]])
    weights = prototype_weights(local, means, present)[:, 0]
    assert weights.tolist() == pytest.approx([0.95931, 0.03422, 0.00646], abs=1e-5)
    # Squared: d = 1, 4, 16; p = 1, 1/4, 1/16; rescaled by (p - 1/16) / (15/16): 1, 1/5, 0; e^5, e^1, e^0; sum 152.1315.
    squared = prototype_weights(local, means, present, squared=True)[:, 0]
    assert squared.tolist() == pytest.approx([148.4132 / 152.1315, 2.7183 / 152.1315, 1 / 152.1315], abs=1e-5)


def test_reweight_of_two_clients_by_hand() -> None:
    # D = 2, two classes. Both clients hold class 0, with means (0, 0) and (3, 4); class 1 is held by nobody.
    # Client 0 has prototype (0, 4): distances 4 to (0, 0) and 3 to (3, 4), d = 7.
    # Client 1 has prototype (6, 8): distances 10 and 5, d = 15. Rescaled p: 1 and 0.
    # Weights e^5 / (e^5 + 1) = 148.4132 / 149.4132 = 0.993307 and 0.006693.
    # Class 0: 0.993307 (0, 4) + 0.006693 (6, 8) = (0.040158, 4.026772). Class 1: mean of (2, 0) and (4, 2) = (3, 1).
    # The rest is averaged by n = 30 and 10: 3/4 * 4 + 1/4 * 8 = 5.
    def payload(client: int, samples: int, prototype: list, mean: list, lora: float) -> Tree:
        tensors = {"prototype": torch.tensor(prototype), "class.mean": torch.tensor(mean), "lora": torch.tensor([lora])}
        return {**tensors, "class.count": torch.tensor([float(samples), 0.0]), **envelope(client, samples)}

    payloads = [
        payload(0, 30, [[0.0, 4.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], 4.0),
        payload(1, 10, [[6.0, 8.0], [4.0, 2.0]], [[3.0, 4.0], [0.0, 0.0]], 8.0),
    ]
    merged = prototype_reweight(payloads)
    assert merged.keys() == {"prototype", "lora"}
    assert merged["prototype"][0].tolist() == pytest.approx([0.040158, 4.026772], abs=1e-5)
    assert merged["prototype"][1].tolist() == [3.0, 1.0]
    assert merged["lora"].tolist() == [5.0]
    assert prototype_reweight(payloads, uniform)["lora"].tolist() == [6.0]
    # tau = 5: e^0.2 / (e^0.2 + 1) = 1.221403 / 2.221403 = 0.549834
    assert prototype_reweight(payloads, temperature=5.0)["prototype"][0, 0].item() == pytest.approx(6 * (1 - 0.549834), abs=1e-5)


@some
@given(st.integers(1, 6), seeds, seeds)
def test_reweighted_prototypes_stay_in_the_hull(count: int, seed: int, shuffle: int) -> None:
    payloads = random_payloads(count, seed, prototypes)
    merged, local = prototype_reweight(payloads)["prototype"], torch.stack([p["prototype"] for p in payloads])
    assert (merged >= local.amin(0) - 1e-12).all() and (merged <= local.amax(0) + 1e-12).all()
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    assert close(prototype_reweight([payloads[i] for i in order])["prototype"], merged, 1e-6)


# ---------------------------------------------------------------- sorted pools


def pool_rows(tree: Tree) -> list[tuple[float, ...]]:
    """(key, prompt) pairs of a pool as flat rows."""
    return [(*key.tolist(), *prompt.flatten().tolist()) for key, prompt in zip(tree["pool.key"], tree["pool.prompt"], strict=True)]


@some
@given(seeds)
def test_sorting_is_a_stable_permutation(seed: int) -> None:
    (payload,) = random_payloads(1, seed, prompt_pool)
    merged = sort_by_usage([payload])
    before, usage = pool_rows(payload), payload["usage"].tolist()
    expected = sorted(range(5), key=lambda i: (-usage[i], i))
    assert pool_rows(merged) == [before[i] for i in expected]
    assert sorted(pool_rows(merged)) == sorted(before)  # each key keeps its prompt, none is lost
    assert "usage" not in merged
    again = sort_by_usage([{**merged, "usage": payload["usage"].sort(descending=True).values, **envelope(0, 1)}])
    assert same(again, merged)


@some
@given(seeds, st.permutations(range(5)))
def test_sorting_undoes_a_permutation(seed: int, order: list[int]) -> None:
    """With distinct counts the place of a prompt in the pool does not matter."""
    (payload,) = random_payloads(1, seed, prompt_pool)
    payload["usage"] = torch.randperm(5, generator=rng_of(seed)).double()
    moved = {k: v[order] if k in ("usage", "pool.key", "pool.prompt") else v for k, v in payload.items()}
    assert same(sort_by_usage([payload]), sort_by_usage([moved]))


@some
@given(st.integers(1, 5), seeds, seeds)
def test_sorted_pools_are_averaged_rank_by_rank(count: int, seed: int, shuffle: int) -> None:
    payloads = random_payloads(count, seed, prompt_pool)
    ranked = torch.stack([sort_by_usage([p])["pool.key"] for p in payloads])
    merged = sort_by_usage(payloads)
    assert close(merged["pool.key"], ranked.mean(0))
    assert (merged["pool.key"] >= ranked.amin(0) - 1e-12).all() and (merged["pool.key"] <= ranked.amax(0) + 1e-12).all()
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    assert close(sort_by_usage([payloads[i] for i in order])["pool.prompt"], merged["pool.prompt"])


def test_sorted_pools_of_two_clients_by_hand() -> None:
    # Client 0 chose its prompts 1, 5 and 5 times: order 1, 2, 0 (tie in place) -> keys 20, 30, 10.
    # Client 1 chose 9, 0 and 4 times: order 0, 2, 1 -> keys 1, 3, 2. Plain mean by rank: 10.5, 16.5, 6.
    # Prompts are keys times 100. Weighted by n = 1 and 3 instead: (20 + 3) / 4, (30 + 9) / 4, (10 + 6) / 4.
    def payload(client: int, samples: int, usage: list, keys: list) -> Tree:
        key = torch.tensor(keys)[:, None]
        return {"usage": torch.tensor(usage), "pool.key": key, "pool.prompt": 100 * key[..., None], **envelope(client, samples)}

    payloads = [payload(0, 1, [1.0, 5.0, 5.0], [10.0, 20.0, 30.0]), payload(1, 3, [9.0, 0.0, 4.0], [1.0, 2.0, 3.0])]
    merged = sort_by_usage(payloads)
    assert merged["pool.key"][:, 0].tolist() == [10.5, 16.5, 6.0]
    assert merged["pool.prompt"][:, 0, 0].tolist() == [1050.0, 1650.0, 600.0]
    assert sort_by_usage(payloads, fedavg)["pool.key"][:, 0].tolist() == [5.75, 9.75, 4.0]


# ---------------------------------------------------------------- rows side by side


def rows_of(tree: Tree, prefix: str) -> list[tuple[float, ...]]:
    """Rows as tuples (client, label, then the other columns by name), sorted."""
    table = select(tree, prefix)
    first = [table.pop(f"{prefix}client"), table.pop(f"{prefix}label")]
    columns = [c.double().flatten(1) if c.dim() > 1 else c.double()[:, None] for c in [*first, *(table[k] for k in sorted(table))]]
    return sorted(map(tuple, torch.cat(columns, 1).tolist()))


@pytest.mark.parametrize(("prefix", "own"), [("gauss.", gaussian_rows), ("local.", prototype_rows)])
@some
@given(count=clients, seed=seeds, shuffle=seeds)
def test_collected_rows_are_all_rows(prefix: str, own: Callable, count: int, seed: int, shuffle: int) -> None:
    payloads = random_payloads(count, seed, own)
    merged = collect_rows(payloads, prefix, fedavg)
    single = [row for p in payloads for row in rows_of({**p, f"{prefix}client": p["client"].expand(len(p[f"{prefix}label"]))}, prefix)]
    assert rows_of(merged, prefix) == sorted(single)
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    assert rows_of(collect_rows([payloads[i] for i in order], prefix, fedavg), prefix) == rows_of(merged, prefix)
    assert close(merged["head"], fedavg([drop(p, prefix) for p in payloads])["head"])


def local_rows(*rows: tuple[int, int, float]) -> Tree:
    """Prototype rows from (client, label, value)."""
    client, label, value = zip(*rows, strict=True) if rows else ((), (), ())
    return {
        "local.client": torch.tensor(client, dtype=torch.int64),
        "local.label": torch.tensor(label, dtype=torch.int64),
        "local.mean": torch.tensor(value, dtype=torch.float64)[:, None],
    }


def test_latest_rows_win_by_hand() -> None:
    held = local_rows((0, 3, 1.0), (1, 3, 2.0), (0, 4, 3.0))
    sent = local_rows((1, 3, 20.0), (1, 4, 30.0))
    # (1, 3) is replaced; (0, 3) has the label but another client, (0, 4) likewise: both stay; (1, 4) is new.
    assert rows_of(keep_latest(held, sent, "local."), "local.") == [(0, 3, 1.0), (0, 4, 3.0), (1, 3, 20.0), (1, 4, 30.0)]
    assert rows_of(keep_latest(local_rows(), sent, "local."), "local.") == [(1, 3, 20.0), (1, 4, 30.0)]
    assert rows_of(keep_latest(held, local_rows(), "local."), "local.") == rows_of(held, "local.")


pairs = st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.integers(-9, 9).map(float), max_size=8)


@some
@given(pairs, pairs, st.randoms(use_true_random=False))
def test_latest_rows_are_a_dictionary_update(held: dict, sent: dict, order) -> None:
    def tree(entries: dict) -> Tree:
        rows = [(*pair, value) for pair, value in entries.items()]
        order.shuffle(rows)
        return local_rows(*rows)

    state, merged = tree(held), tree(sent)
    before = copy([state, merged])
    after = keep_latest(state, merged, "local.")
    assert rows_of(after, "local.") == sorted((*pair, value) for pair, value in {**held, **sent}.items())
    assert same(state, before[0]) and same(merged, before[1])
    assert rows_of(keep_latest(after, merged, "local."), "local.") == rows_of(after, "local.")  # once is enough
