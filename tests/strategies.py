"""What several test files share: random spaces, rows of random bits, repeatable settings."""

import numpy as np
from gymnasium import spaces
from hypothesis import HealthCheck, settings, strategies as st


def cases(n):
    "Return settings for about n/4 fixed examples; `tests/soak/properties.py` runs random ones"
    soak = settings.get_current_profile_name() == 'soak'
    return settings(
        max_examples=20 * n if soak else max(n // 4, min(n, 25)),
        derandomize=not soak,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# ---- spaces ----

DTYPES = [
    'uint8',
    'int8',
    'uint16',
    'int16',
    'uint32',
    'int32',
    'uint64',
    'int64',
    'float16',
    'float32',
    'float64',
    'bool',
]
boxes = st.builds(
    lambda shape, dtype: spaces.Box(0, 1, shape, np.dtype(dtype).type),
    st.sampled_from([(), (1,), (3,), (0,), (2, 3), (1, 2, 1)]),
    st.sampled_from(DTYPES),
)
discrete = st.builds(
    lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)
)
multi = st.sampled_from([[3], [2, 5], [[2, 3], [4, 5]]]).map(spaces.MultiDiscrete)
binary = st.sampled_from([1, 4, [2, 3]]).map(spaces.MultiBinary)
plain = boxes | discrete | multi | binary
names = st.sampled_from(
    ['pos', 'a', 'b.c', 'name with blanks', 'é', '0', 'state', '_x', 'names', '[1]', '[0']
)
any_space = st.recursive(
    plain,
    lambda s: (
        st.dictionaries(names, s, min_size=1, max_size=3).map(spaces.Dict)
        | st.lists(s, min_size=1, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=6,
)

# ---- rows ----


def numpy_leaves(a):
    "All plain fields of a structured array, depth first"
    if a.dtype.names is None:
        yield a
    else:
        for n in a.dtype.names:
            yield from numpy_leaves(a[n])


def numbers(n, dtype, seed=0):
    "Rows whose every field holds other small numbers, none of them NaN"
    rows, rng = np.zeros(n, dtype), np.random.default_rng(seed)
    for a in numpy_leaves(rows):
        a[...] = rng.integers(0, 2 if a.dtype == bool else 100, a.shape)
    return rows


ENVS = [0, 3, 15, 4000]


def story(program, dtype):
    """Return what a string of bytes tells: (rows, cuts).

    A byte is a step of one of four environments, which continues, terminates, is truncated, does
    both, or is never heard of again (and an episode with the same or another number begins). It
    may also end a block, before an empty one or a save."""
    rows, cuts, place = numbers(len(program), dtype, len(program)), [], [[1, 0] for _ in ENVS]
    for i, (b, r) in enumerate(zip(program, rows)):
        env, what = place[b & 3], b >> 2 & 7
        env[1] += 1
        r['env_id'], r['episode_n'], r['step_n'] = ENVS[b & 3], *env
        r['terminated'], r['truncated'] = what in (1, 3), what in (2, 3)
        if what in (1, 2, 3, 4):
            env[:] = env[0] + 1, 0
        if what == 5:
            env[1] = 0  # the same number again
        if what == 6:
            env[:] = env[0] + 1, 7  # another episode, joined in its middle
        if b >> 5 & 3:
            cuts.append((i + 1, b >> 5 & 3))
    return rows, cuts


def scribble(rows, seed=0):
    "Fill each plain field with random bits (NaN included); booleans stay 0 or 1"
    rng = np.random.default_rng(seed)
    for a in numpy_leaves(rows):
        if a.dtype == bool:
            a[...] = rng.integers(0, 2, a.shape)
        else:
            a[...] = np.frombuffer(rng.bytes(a.size * a.itemsize), a.dtype).reshape(a.shape)
    return rows


def bits(x):
    "The very bits of an array or tensor; what lies between columns is no column's"
    x = np.asarray(x)
    if x.dtype.names:
        return [bits(x[n]) for n in x.dtype.names]
    return np.ascontiguousarray(x).tobytes()


def pairs(field, tensors):
    "Each plain field of an array beside its tensor in the nested column"
    names = field.dtype.names
    if names is None:
        yield field, tensors
    else:
        parts = tensors if isinstance(tensors, tuple) else list(tensors.values())
        assert len(parts) == len(names) and (
            isinstance(tensors, tuple) or list(tensors) == list(names)
        )
        for n, t in zip(names, parts):
            yield from pairs(field[n], t)


def equal(a, b):
    "The same rows, bit for bit, wherever they lie"
    assert type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype
    for x, y in zip(numpy_leaves(a.to('cpu').rows), numpy_leaves(b.to('cpu').rows)):
        assert bits(x) == bits(y)
    if hasattr(type(a), 'burn_in'):
        assert a._each == b._each


def same_memory(line, plain, seed=0):
    "Check that both hold the same rows, and give the same windows and steps along episodes"
    shift = line.base - plain.base  # after going back
    assert (line.keys == plain.keys + shift).all()
    if not len(plain):
        return
    keys = np.random.default_rng(seed).choice(plain.keys, 9)
    equal(line[:], plain[:])
    batch = plain.batch(keys, np.ones(9))
    batch.rows['index'] += shift
    equal(line.batch(keys + shift, np.ones(9)), batch)
    equal(line.windows(keys + shift, 4), plain.windows(keys, 4))
    ways = plain.walk(keys, [1, -1])
    ways[ways >= 0] += shift
    assert (line.walk(keys + shift, [1, -1]) == ways).all()
