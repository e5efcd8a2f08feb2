"""A numpy machine that runs `simt.Thread` code: all threads of one cluster, one instruction at a time.

It stands in for a GPU in two ways that matter for correctness. It refuses what hardware leaves undefined:
warp votes by part of a warp, barriers by part of a block, reads of shared memory that another thread wrote
(or writes to what another read) since the last barrier, accesses outside an array. And it hands out the
results of atomic counters in random order, as arrival order is on hardware.
"""

import contextlib

import numpy as np

U32 = np.uint32
PLAIN, ATOMIC, FETCH = 1, 2, 3  # a fetched count depends on what was added before it
MANY = -2


class Lockstep:
    def __init__(self, arrays, shared_words, n_threads, cluster, group, rng):
        """`arrays`: name -> (flat uint32 buffer, offset of element 0 in it)."""
        self.n_threads, self.cluster, self.arrays, self.rng = n_threads, cluster, arrays, rng
        total = n_threads * cluster
        self.thread = np.arange(total)
        self.tid = (self.thread % n_threads).astype(U32)
        self.rank = (self.thread // n_threads).astype(U32)
        self.lane, self.warp = self.tid & U32(31), self.tid >> U32(5)
        self.group = np.full(total, group, U32)
        self.mask = np.ones(total, bool)
        self.shared = rng.integers(0, 2**32, (cluster, shared_words), dtype=U32)
        self.clock, self.cluster_clock = np.ones(cluster, np.int64), 1
        shape = (cluster, shared_words)
        self.written, self.writer, self.how = (np.zeros(shape, np.int64) for _ in range(3))
        self.seen, self.seer = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.writer_warp, self.seer_warp = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.written_far, self.seen_far = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def _word(self, x):
        return np.broadcast_to(np.asarray(x, U32), self.mask.shape)

    # Values.

    def word(self, value):
        return np.full(self.mask.shape, value, U32)

    def select(self, pred, a, b):
        return np.where(pred, self._word(a), self._word(b))

    def min(self, a, b):
        return np.minimum(self._word(a), self._word(b))

    def max(self, a, b):
        return np.maximum(self._word(a), self._word(b))

    def clip_signed(self, a, low, high):
        return np.clip(a.view(np.int32), low, high).astype(np.int32).view(U32)

    def sign_mask(self, a):
        return (a.view(np.int32) >> 31).view(U32)

    def divide(self, a, b):
        a, b = self._word(a), self._word(b)
        assert (b[self.mask] > 0).all(), "division by zero"
        return np.where(self.mask, a // np.maximum(b, U32(1)), U32(0))

    def popcount(self, a):
        return np.bitwise_count(a).astype(U32)

    def leading_zeros(self, a):
        return (32 - np.frexp(a.astype(np.float64))[1]).astype(U32)

    def lowest_bit(self, a):
        low = a & (~a + U32(1))
        return (np.frexp(np.maximum(low, 1).astype(np.float64))[1] - 1).astype(U32)

    def fmax(self, a, b):
        return np.fmax(a.view(np.float32), b.view(np.float32)).view(U32)

    def fge(self, a, b):
        with np.errstate(invalid="ignore"):
            return a.view(np.float32) >= b.view(np.float32)

    def fadd_zero(self, a):
        with np.errstate(invalid="ignore"):
            return (a.view(np.float32) + np.float32(0)).view(U32)

    def sqrt_ceil(self, a):
        return np.ceil(np.sqrt(a.astype(np.float64))).astype(U32)

    # Warp.

    def _warps(self, a):
        active = self.mask.reshape(-1, 32)
        assert (active.all(1) | ~active.any(1)).all(), (
            "part of a warp takes part in a warp operation"
        )
        return np.asarray(a).reshape(-1, 32)

    def ballot(self, pred):
        bits = self._warps(pred & self.mask).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        return np.repeat(bits.sum(1).astype(U32), 32)

    def warp_sum(self, a):
        return np.repeat(self._warps(a).sum(1, dtype=U32), 32)

    def shift_lanes(self, a, distance):
        lanes = np.maximum(np.arange(32) - distance, 0)
        lanes = np.where(np.arange(32) >= distance, lanes, np.arange(32))
        return self._warps(a)[:, lanes].reshape(-1)

    def warp_fetch_add(self, region, total):
        totals = self._warps(total)
        assert (totals == totals[:, :1]).all(), "not the same in all lanes"
        out = np.zeros(totals.shape, U32)
        for warp in self.rng.permutation(len(totals)):
            if self.mask[32 * warp]:
                rank = self.rank[32 * warp]
                one = np.zeros(self.mask.shape, bool)
                one[32 * warp] = True
                self._note_write(self.rank, np.full(self.mask.shape, region), one, FETCH)
                out[warp] = self.shared[rank, region]
                self.shared[rank, region] += totals[warp, 0]
        return out.reshape(-1)

    # Shared memory.

    def _note_read(self, rank, index, mask):
        if not mask.any():
            return
        rank, index, thread = rank[mask], index[mask], self.thread[mask]
        assert ((index >= 0) & (index < self.shared.shape[1])).all(), "outside shared memory"
        own = rank == thread // self.n_threads
        fresh = (self.written[rank, index] == self.clock[rank]) & (
            self.writer[rank, index] != thread
        )
        assert not (fresh & own).any(), "read of what another thread wrote since the last barrier"
        fresh_far = self.written_far[rank, index] == self.cluster_clock
        assert not (fresh_far & ~own).any(), "read of what another block wrote since the barrier"
        # Threads that read the same word now count one after the other.
        order = np.argsort(rank * self.shared.shape[1] + index, kind="stable")
        place = rank[order], index[order]
        flat = place[0] * self.shared.shape[1] + place[1]
        for readers, warps in ((self.seer, thread), (self.seer_warp, thread // 32)):
            now = warps[order]
            first = np.r_[True, flat[1:] != flat[:-1]]
            low = np.minimum.reduceat(now, np.flatnonzero(first))
            high = np.maximum.reduceat(now, np.flatnonzero(first))
            at = place[0][first], place[1][first]
            before = self.seen[at] == self.clock[at[0]]
            same = (low == high) & (~before | (readers[at] == low))
            readers[at] = np.where(same, low, MANY)
        self.seen[rank[own], index[own]] = self.clock[rank[own]]
        self.seen_far[rank[~own], index[~own]] = self.cluster_clock

    def _note_write(self, rank, index, mask, how):
        rank, index, thread = rank[mask], index[mask], self.thread[mask]
        assert ((index >= 0) & (index < self.shared.shape[1])).all(), "outside shared memory"
        other = (self.written[rank, index] == self.clock[rank]) & (
            self.writer[rank, index] != thread
        )
        both = (self.how[rank, index] == how) & (how != PLAIN)
        assert not (other & ~both).any(), "write over what another thread wrote"
        seen = (self.seen[rank, index] == self.clock[rank]) & (self.seer[rank, index] != thread)
        assert not seen.any(), "write to what another thread read since the last barrier"
        far = self.seen_far[rank, index] == self.cluster_clock
        assert not far.any(), "write to what another block read since the last barrier"
        if how == PLAIN:
            flat = rank * self.shared.shape[1] + index
            assert len(np.unique(flat)) == len(flat), "two threads write one word"
        self.written[rank, index], self.how[rank, index] = self.clock[rank], how
        self.writer[rank, index] = np.where(other, MANY, thread)
        warp = thread // 32
        stranger = other & (self.writer_warp[rank, index] != warp)
        self.writer_warp[rank, index] = np.where(stranger, MANY, warp)
        if how != PLAIN:
            self.writer[rank, index] = self.writer_warp[rank, index] = MANY
        self.written_far[rank, index] = self.cluster_clock

    def _places(self, region, index, n=1):
        first = region + self._word(index).astype(np.int64)
        assert n == 1 or (first[self.mask] % n == 0).all(), "not aligned"
        return [first + i for i in range(n)]

    def _load(self, rank, region, index, n):
        rank, out = np.asarray(rank).astype(np.int64), []
        for place in self._places(region, index, n):
            self._note_read(rank, place, self.mask)
            safe = np.where(self.mask, place, 0)
            out.append(self.shared[rank, safe])
        return out

    def load(self, region, index):
        return self._load(self.rank, region, index, 1)[0]

    def load4(self, region, index):
        return self._load(self.rank, region, index, 4)

    def peer_load(self, rank, region, index):
        return self._load(self._word(rank), region, index, 1)[0]

    def peer_load4(self, rank, region, index):
        return self._load(self._word(rank), region, index, 4)

    def _store(self, region, index, values):
        rank = self.rank.astype(np.int64)
        for place, value in zip(self._places(region, index, len(values)), values, strict=True):
            self._note_write(rank, place, self.mask, PLAIN)
            self.shared[rank[self.mask], place[self.mask]] = self._word(value)[self.mask]

    def peer_store4(self, rank, region, index, a):
        rank = self._word(rank).astype(np.int64)
        for place, value in zip(self._places(region, index, 4), a, strict=True):
            self._note_write(rank, place, self.mask, PLAIN)
            self.shared[rank[self.mask], place[self.mask]] = self._word(value)[self.mask]

    def store(self, region, index, a):
        self._store(region, index, [a])

    def store4(self, region, index, a):
        self._store(region, index, a)

    def _atomic(self, ufunc, region, index, a):
        rank = self.rank.astype(np.int64)
        (place,) = self._places(region, index)
        self._note_write(rank, place, self.mask, ATOMIC)
        ufunc.at(self.shared, (rank[self.mask], place[self.mask]), self._word(a)[self.mask])

    def add(self, region, index, a):
        self._atomic(np.add, region, index, a)

    def or_(self, region, index, a):
        self._atomic(np.bitwise_or, region, index, a)

    def warp_barrier(self):
        for warp in np.flatnonzero(self._warps(self.mask)[:, 0]):
            for when, who in ((self.written, self.writer_warp), (self.seen, self.seer_warp)):
                when[(who == warp) & (when == self.clock[:, None])] = 0

    def barrier(self):
        # Code under `when` runs here even where no thread takes it.
        blocks = self.mask.reshape(self.cluster, -1)
        assert (blocks.all(1) | ~blocks.any(1)).all(), "part of the block waits"
        self.clock += blocks.all(1)

    def cluster_barrier(self):
        assert self.mask.all() | ~self.mask.any(), "part of the cluster waits"
        self.clock += self.mask.all()
        self.cluster_clock += self.mask.all()

    # Global memory.

    def address(self, name, row, stride, offset=0):
        row, offset = self._word(row).astype(np.int64), self._word(offset).astype(np.int64)
        buffer, origin = self.arrays[name]
        return buffer, origin + row * stride + offset

    def phase(self, address):
        return (address[1] % 4).astype(U32)

    def align(self, address):
        return address[0], address[1] // 4 * 4

    def _elements(self, address, index, size):
        buffer, first = address
        place = first + self._word(index).astype(np.int64) * size
        inside = (place >= 0) & (place + size <= len(buffer))
        assert inside[self.mask].all(), "outside the array"
        return buffer, np.where(self.mask, place, 0)

    def read(self, address, index):
        buffer, place = self._elements(address, index, 1)
        return buffer[place]

    def read4(self, address, group):
        buffer, place = self._elements(address, group, 4)
        return [buffer[place + i] for i in range(4)]

    def copy4(self, region, index, address, group):
        self.store4(region, index, self.read4(address, group))

    def prefetch4(self, address, group, n_groups):
        n_groups = self._word(n_groups)
        assert (n_groups[self.mask] > 0).all(), "nothing to ask for"
        self._elements(address, group, 4)
        self._elements(address, self._word(group) + n_groups - U32(1), 4)

    def wait_copies(self):
        pass

    def write(self, address, index, a):
        buffer, place = self._elements(address, index, 1)
        buffer[place[self.mask]] = self._word(a)[self.mask]

    # Control flow.

    @contextlib.contextmanager
    def when(self, pred):
        outer, self.mask = self.mask, self.mask & pred
        yield
        self.mask = outer

    def keep_rolled(self):
        pass

    def loop(self, low, high, step, *state):
        def run(body):
            i, top, now = self._word(low), self._word(high).view(np.int32), state
            while True:
                with self.when(i.view(np.int32) < top):
                    if not self.mask.any():
                        break
                    new = body(i, *now) or ()
                    now = tuple(np.where(self.mask, a, b) for a, b in zip(new, now, strict=True))
                    i = np.where(self.mask, i + U32(step), i)
            return now

        return run

    def repeat(self, *state):
        def run(body):
            now, outer = state, self.mask
            while self.mask.any():
                again, *new = body(*now)
                now = tuple(np.where(self.mask, a, b) for a, b in zip(new, now, strict=True))
                self.mask = self.mask & again
            self.mask = outer
            return now

        return run
