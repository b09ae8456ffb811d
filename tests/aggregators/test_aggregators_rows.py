"""Aggregators that order rows: pools sorted by usage, and rows of all clients in one table."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fczoo import Payload, Tree
from fczoo.aggregators.averaging import fedavg, sort_by_usage
from fczoo.aggregators.prototypes import collect_rows, keep_latest
from fczoo.core.tree import select
from fczoo.testing.federation_parts import random_uploads
from helpers_aggregators import (
    clients,
    close,
    gaussian_rows,
    prompt_pool,
    prototype_rows,
    rng_of,
    same,
    seeds,
    some,
)

# ---------------------------------------------------------------- sorted pools


def pool_rows(tree: Tree) -> list[tuple[float, ...]]:
    """Return the (key, prompt) pairs of a pool as flat rows."""
    return [
        (*key.tolist(), *prompt.flatten().tolist())
        for key, prompt in zip(tree["pool.key"], tree["pool.prompt"], strict=True)
    ]


@some
@given(seeds)
def test_sorting_is_stable_permutation(seed: int) -> None:
    (payload,) = random_uploads(1, seed, prompt_pool)
    pool = sort_by_usage([payload])
    rows, usage = pool_rows(payload), payload["usage"].tolist()
    order = sorted(range(5), key=lambda i: (-usage[i], i))
    assert pool_rows(pool) == [rows[i] for i in order]
    assert sorted(pool_rows(pool)) == sorted(rows)  # each key keeps its prompt, none is lost
    assert "usage" not in pool
    again = sort_by_usage(
        [payload.holding({**pool, "usage": payload["usage"].sort(descending=True).values})]
    )
    assert same(again, pool)


@some
@given(seeds, st.permutations(range(5)))
def test_sorting_ignores_prompt_order(seed: int, order: list[int]) -> None:
    """Ignore the position of a prompt in the pool if the counts are distinct."""
    (payload,) = random_uploads(1, seed, prompt_pool)
    payload = payload.holding(
        {**payload, "usage": torch.randperm(5, generator=rng_of(seed)).double()}
    )
    permuted_pool = {
        k: v[order] if k in ("usage", "pool.key", "pool.prompt") else v for k, v in payload.items()
    }
    assert same(sort_by_usage([payload]), sort_by_usage([payload.holding(permuted_pool)]))


@some
@given(st.integers(1, 5), seeds, seeds)
def test_sorted_pools_are_averaged_by_rank(count: int, seed: int, shuffle: int) -> None:
    payloads = random_uploads(count, seed, prompt_pool)
    sorted_keys = torch.stack([sort_by_usage([p])["pool.key"] for p in payloads])
    pool = sort_by_usage(payloads)
    assert close(pool["pool.key"], sorted_keys.mean(0))
    assert (pool["pool.key"] >= sorted_keys.amin(0) - 1e-12).all()
    assert (pool["pool.key"] <= sorted_keys.amax(0) + 1e-12).all()
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    assert close(sort_by_usage([payloads[i] for i in order])["pool.prompt"], pool["pool.prompt"])


def test_sorted_pools_of_two_clients_by_hand() -> None:
    # Client 0 chose its prompts 1, 5 and 5 times: order 1, 2, 0 (tie in place) -> keys 20, 30, 10.
    # Client 1 chose 9, 0 and 4 times: order 0, 2, 1 -> keys 1, 3, 2. Plain mean by rank: 10.5,
    # 16.5, 6. Prompts are keys times 100. Weighted by n = 1 and 3 instead: (20 + 3) / 4, (30 + 9) /
    # 4, (10 + 6) / 4.
    def payload(client: int, samples: int, usage: list, keys: list) -> Payload:
        key = torch.tensor(keys)[:, None]
        pool = {"usage": torch.tensor(usage), "pool.key": key, "pool.prompt": 100 * key[..., None]}
        return Payload(pool, client, samples)

    payloads = [
        payload(0, 1, [1.0, 5.0, 5.0], [10.0, 20.0, 30.0]),
        payload(1, 3, [9.0, 0.0, 4.0], [1.0, 2.0, 3.0]),
    ]
    average = sort_by_usage(payloads)
    assert average["pool.key"][:, 0].tolist() == [10.5, 16.5, 6.0]
    assert average["pool.prompt"][:, 0, 0].tolist() == [1050.0, 1650.0, 600.0]
    assert sort_by_usage(payloads, fedavg)["pool.key"][:, 0].tolist() == [5.75, 9.75, 4.0]


# ---------------------------------------------------------------- rows side by side


def rows_of(tree: Tree, prefix: str) -> list[tuple[float, ...]]:
    """Return sorted tuples (client, label, then the other columns by name)."""
    table = select(tree, prefix)
    first = [table.pop(f"{prefix}client"), table.pop(f"{prefix}label")]
    columns = [
        c.double().flatten(1) if c.dim() > 1 else c.double()[:, None]
        for c in [*first, *(table[k] for k in sorted(table))]
    ]
    return sorted(map(tuple, torch.cat(columns, 1).tolist()))


@pytest.mark.parametrize(("prefix", "own"), [("gauss.", gaussian_rows), ("local.", prototype_rows)])
@some
@given(count=clients, seed=seeds, shuffle=seeds)
def test_collect_rows_keeps_all_rows(
    prefix: str, own: Callable, count: int, seed: int, shuffle: int
) -> None:
    payloads = random_uploads(count, seed, own)
    table = collect_rows(payloads, prefix, fedavg)
    single = [
        row
        for p in payloads
        for row in rows_of(
            {**p, f"{prefix}client": torch.full_like(p[f"{prefix}label"], p.client)}, prefix
        )
    ]
    assert rows_of(table, prefix) == sorted(single)
    order = torch.randperm(count, generator=rng_of(shuffle)).tolist()
    assert rows_of(collect_rows([payloads[i] for i in order], prefix, fedavg), prefix) == rows_of(
        table, prefix
    )
    assert close(table["head"], fedavg([p.drop(prefix) for p in payloads])["head"])


def local_rows(*rows: tuple[int, int, float]) -> Tree:
    """Make prototype rows from (client, label, value)."""
    client, label, value = zip(*rows, strict=True) if rows else ((), (), ())
    return {
        "local.client": torch.tensor(client, dtype=torch.int64),
        "local.label": torch.tensor(label, dtype=torch.int64),
        "local.mean": torch.tensor(value, dtype=torch.float64)[:, None],
    }


def test_keep_latest_by_hand() -> None:
    old_rows = local_rows((0, 3, 1.0), (1, 3, 2.0), (0, 4, 3.0))
    new_rows = local_rows((1, 3, 20.0), (1, 4, 30.0))
    # (1, 3) is replaced; (0, 3) has the label but another client, (0, 4) likewise: both stay; (1,
    # 4) is new.
    assert rows_of(keep_latest(old_rows, new_rows, "local."), "local.") == [
        (0, 3, 1.0),
        (0, 4, 3.0),
        (1, 3, 20.0),
        (1, 4, 30.0),
    ]
    assert rows_of(keep_latest(local_rows(), new_rows, "local."), "local.") == [
        (1, 3, 20.0),
        (1, 4, 30.0),
    ]
    assert rows_of(keep_latest(old_rows, local_rows(), "local."), "local.") == rows_of(
        old_rows, "local."
    )


pairs = st.dictionaries(
    st.tuples(st.integers(0, 4), st.integers(0, 4)), st.integers(-9, 9).map(float), max_size=8
)


@some
@given(pairs, pairs, st.randoms(use_true_random=False))
def test_keep_latest_equals_dictionary_update(held: dict, sent: dict, order) -> None:
    def tree(entries: dict) -> Tree:
        rows = [(*pair, value) for pair, value in entries.items()]
        order.shuffle(rows)
        return local_rows(*rows)

    state, new_rows = tree(held), tree(sent)
    copies = [{k: v.clone() for k, v in tree.items()} for tree in (state, new_rows)]
    latest = keep_latest(state, new_rows, "local.")
    assert rows_of(latest, "local.") == sorted(
        (*pair, value) for pair, value in {**held, **sent}.items()
    )
    assert same(state, copies[0]) and same(new_rows, copies[1])
    assert rows_of(keep_latest(latest, new_rows, "local."), "local.") == rows_of(
        latest, "local."
    )  # idempotent
