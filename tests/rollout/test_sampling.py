"""Seeds and claims: each response has its own seed, each prompt exactly one taker."""

from __future__ import annotations

import random
import threading

from torch.distributed import HashStore

from rlscale.rollout.sampling import Claims, sample_seed
from tests import worlds


def test_seeds_are_distinct_and_depend_on_the_sample_alone():
    seeds = [sample_seed(seed, p, i) for seed in range(5) for p in range(40) for i in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(3, 7, 1) == sample_seed(3, 7, 1)
    assert sample_seed(1, 11, 1) != sample_seed(1, 1, 11)


def test_claims_cover_every_position_once_whatever_their_sizes():
    rng = random.Random(0)
    for total in (0, 1, 7, 64):
        counter = HashStore()
        takers = [Claims(counter, "step", range(total)) for _ in range(3)]
        taken: list[int] = []
        while not all(taker.exhausted for taker in takers):
            taken += rng.choice(takers).take(rng.randint(1, 5))
        assert taken == list(range(total))
        assert all(len(taker.take(2)) == 0 for taker in takers)


def test_fixed_shares_cover_every_position_once() -> None:
    for total in (0, 1, 7):
        shares = [Claims(HashStore(), "step", range(replica, total, 3)) for replica in range(3)]
        taken = [[*share.take(1), *share.take(5)] for share in shares]
        assert sorted(sum(taken, [])) == list(range(total))
        assert max(map(len, taken)) - min(map(len, taken)) <= 1
        assert all(share.exhausted and len(share.take(1)) == 0 for share in shares)


def test_lists_do_not_share_a_counter():
    counter = HashStore()
    assert list(Claims(counter, "step 1", range(3)).take(3)) == [0, 1, 2]
    assert list(Claims(counter, "step 2", range(3)).take(2)) == [0, 1]


def claim_all(total: int) -> list[int]:
    import torch.distributed as dist

    store = dist.PrefixStore("test-claims", dist.distributed_c10d._get_default_store())
    claims = Claims(store, f"list of {total}", range(total))
    mine: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while positions := claims.take(2):
            with lock:
                mine.extend(positions)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return mine


def test_claims_through_the_store_of_a_world():
    shares = worlds.run(2, claim_all, 501)
    assert sorted(position for share in shares for position in share) == list(range(501))
