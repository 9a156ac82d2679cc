"""Every attention against plain loops over one document: outputs, gradients, padding, neighbours, cost."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from pyramidion.attention import (
    BlockwiseAttention,
    EfficientAttention,
    FullAttention,
    Layout,
    LSHAttention,
    SelfAttention,
)
from pyramidion.attention.efficient import efficient
from pyramidion.attention.heads import eager, fused, received
from pyramidion.attention.local import local
from pyramidion.attention.lsh import hashed, lsh, rotations

WIDTH, HEADS = 21, 3  # e = 7
BLOCK, WINDOW, BUCKET = 11, 5, 3
BATCHES = [(1,), (2, 1), (13,), (29, 1, 7, 30), (5, 33, 2, 22), (11, 11)]
KINDS: dict[str, Callable[[], SelfAttention]] = {
    "full": lambda: FullAttention(WIDTH, HEADS),
    "blockwise": lambda: BlockwiseAttention(WIDTH, HEADS),
    "lsh": lambda: LSHAttention(WIDTH, HEADS, bucket=BUCKET, hashes=2, local_heads=1, window=WINDOW),
    "lsh alone": lambda: LSHAttention(WIDTH, HEADS, bucket=BUCKET, hashes=3, local_heads=0),
    "efficient": lambda: EfficientAttention(WIDTH, HEADS, local_heads=1, window=WINDOW),
    "efficient alone": lambda: EfficientAttention(WIDTH, HEADS, local_heads=0),
    "local alone": lambda: EfficientAttention(WIDTH, HEADS, local_heads=HEADS, window=WINDOW),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_batch = pytest.mark.parametrize("lengths", BATCHES, ids=str)


def build(kind: str, dtype: torch.dtype = torch.float64) -> SelfAttention:
    """An attention in evaluation whose products spread: the default weights give nearly equal shares."""
    attention = KINDS[kind]().to(dtype).eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.ndim == 2 else 0.3))
    return attention


def draw(lengths: tuple[int, ...], *, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> list[Tensor]:
    return [torch.randn(length, width, dtype=dtype) for length in lengths]


def blocks_of(documents: list[Tensor], layout: Layout, garbage: float = 50.0) -> Tensor:
    """Blocks [B m ...] of documents, with large noise in every place that holds no token."""
    x = layout.pack(torch.nn.utils.rnn.pad_sequence(documents, batch_first=True))
    mask = layout.mask.view(*layout.mask.shape, *[1] * (x.ndim - 2))
    return x.where(mask, torch.randn_like(x) * garbage)


def run(attention: SelfAttention, documents: list[Tensor], m: int = BLOCK, **options) -> list[Tensor]:
    """What an attention makes of each document of a batch."""
    layout = Layout([len(document) for document in documents], m)
    y, _ = attention(blocks_of(documents, layout), layout, **options)
    return [row[: len(document)] for row, document in zip(layout.unpack(y), documents, strict=True)]


# --------------------------------------------------------------------------------------------------------------------
# The references: one document, plain loops
# --------------------------------------------------------------------------------------------------------------------


def attended(query: Tensor, key: Tensor, value: Tensor, seen: Callable[[int, int], bool]) -> Tensor:
    """One head [n e] of dot-product attention: token i attends to the tokens j that it has seen."""
    rows = []
    for i in range(len(query)):
        others = [j for j in range(len(query)) if seen(i, j)]
        products = key[others] @ query[i] / math.sqrt(query.shape[1])
        shares = torch.exp(products - products.max().detach())
        rows.append(shares @ value[others] / shares.sum())
    return torch.stack(rows)


def met_in_buckets(buckets: Tensor, size: int) -> Callable[[int, int], bool]:
    """Whom a token meets, given its bucket in each round [n r]: all but itself, or itself if that is all."""
    n, rounds = buckets.shape
    meets = [[False] * n for _ in range(n)]
    for turn in range(rounds):
        number = buckets[:, turn].tolist()
        order = sorted(range(n), key=lambda i: (number[i], i))
        chunk = {i: place // size for place, i in enumerate(order)}
        for i, j in itertools.product(range(n), range(n)):
            meets[i][j] |= number[i] == number[j] and chunk[i] - chunk[j] in (0, 1)
    alone = [sum(row) == 1 for row in meets]
    return lambda i, j: meets[i][j] and (i != j or alone[i])


def efficient_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One head [n e] of efficient attention, with the n × n weights that it never forms."""
    of_query = [torch.exp(row) / torch.exp(row).sum() for row in query]
    of_key = torch.stack([torch.exp(column) / torch.exp(column).sum() for column in key.T])  # [e n]
    return torch.stack([(row @ of_key) @ value for row in of_query])


def bucket_count(n: int, bucket: int) -> int:
    return next(count for count in itertools.count(2, 2) if count * bucket >= n)


def naive_buckets(query: Tensor, bucket: int, table: Tensor) -> Tensor:
    """Buckets [n r] of one head [n e] of one document: the largest entry of [xR, -xR]."""
    half = bucket_count(len(query), bucket) // 2
    rows = []
    for vector, rotation in itertools.product(query.detach(), table.double()):  # rotation [e half]
        turned = [float(vector.double() @ rotation[:, i]) for i in range(half)]
        both = turned + [-entry for entry in turned]
        rows.append(both.index(max(both)))
    return torch.tensor(rows).view(len(query), len(table))


def reference(kind: str, attention: SelfAttention, x: Tensor) -> Tensor:
    """What the attention of that kind makes of one document [n d]."""
    query, value = attention.query(x), attention.value(x)
    key = query if "lsh" in kind else attention.key(x)
    heads, e = [], WIDTH // HEADS
    for head in range(HEADS):
        q, k, v = (part[:, head * e : head * e + e] for part in (query, key, value))
        if "lsh" in kind:
            k = torch.stack([row / row.square().sum().sqrt() for row in q])  # at unit length, head by head
        near = head >= HEADS - getattr(attention, "local_heads", 0)
        if kind == "full":
            mixed = attended(q, k, v, lambda i, j: True)
        elif kind == "blockwise":
            mixed = attended(q, k, v, lambda i, j: i // BLOCK == j // BLOCK)
        elif near:
            mixed = attended(q, k, v, lambda i, j: abs(i // WINDOW - j // WINDOW) <= 1)
        elif "lsh" in kind:
            assert isinstance(attention, LSHAttention)
            far = HEADS - attention.local_heads
            table = rotations(attention.seed, 99, far, attention.hashes, e, x.device)[head]
            mixed = attended(q, k, v, met_in_buckets(naive_buckets(q, BUCKET, table), BUCKET))
        else:
            mixed = efficient_head(q, k, v)
        heads.append(mixed)
    return attention.out(torch.cat(heads, 1))


@every_batch
@every_kind
def test_outputs_and_every_gradient_are_those_of_the_loops(kind: str, lengths: tuple[int, ...]) -> None:
    attention, documents = build(kind), [x.requires_grad_() for x in draw(lengths)]
    expected = [reference(kind, attention, x) for x in documents]
    found = run(attention, documents)
    inputs = {**dict(attention.named_parameters()), **{f"x{i}": x for i, x in enumerate(documents)}}
    outer = [torch.randn_like(y) for y in expected]
    theirs, mine = (
        torch.autograd.grad(sum((y * z).sum() for y, z in zip(ys, outer, strict=True)), list(inputs.values()))
        for ys in (expected, found)
    )
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-11)
    for name, one, two in zip(inputs, mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("size", [1, 4, 7, 64])
def test_lsh_attends_to_what_it_meets_whatever_the_buckets(size: int, rounds: int) -> None:
    lengths = (31, 1, 8, 17)
    layout = Layout(lengths, 7)
    parts = [blocks_of([torch.randn(n, 2, 5, dtype=torch.float64) for n in lengths], layout) for _ in range(3)]
    parts = [part.requires_grad_() for part in parts]
    buckets = layout.pack(torch.randint(6, (layout.b, layout.n, 2, rounds)))
    found = layout.unpack(lsh(*parts, layout, buckets, size))
    (query, key, value), number = (layout.unpack(part) for part in parts), layout.unpack(buckets)
    mine, theirs = [], []
    for row, head in itertools.product(range(len(lengths)), range(2)):
        inside = (row, slice(lengths[row]), head)
        theirs.append(attended(query[inside], key[inside], value[inside], met_in_buckets(number[inside], size)))
        mine.append(found[inside])
    mine, theirs = torch.cat(mine), torch.cat(theirs)
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    outer = torch.randn_like(mine)
    ours, expected = (torch.autograd.grad((y * outer).sum(), parts, retain_graph=True) for y in (mine, theirs))
    for name, one, two in zip(("query", "key", "value"), ours, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("window", [1, 4, 7, 13, 100])
@pytest.mark.parametrize("m", [3, 7, 64])
@pytest.mark.parametrize("lengths", [(9,), (23, 1, 8, 14)], ids=str)
def test_local_windows_of_any_size_over_blocks_of_any_size(lengths: tuple[int, ...], m: int, window: int) -> None:
    layout = Layout(lengths, m)
    query, key, value = (blocks_of(draw(lengths, width=5), layout).unsqueeze(2) for _ in range(3))
    found = layout.unpack(local(query, key, value, layout, window, attend=fused))
    query, key, value = (layout.unpack(part)[:, :, 0] for part in (query, key, value))
    for row, n in enumerate(lengths):
        near = attended(query[row, :n], key[row, :n], value[row, :n], lambda i, j: abs(i // window - j // window) <= 1)
        torch.testing.assert_close(found[row, :n, 0], near)


@pytest.mark.parametrize("kind", ["full", "blockwise", "efficient", "efficient alone", "local alone"])
def test_gradcheck(kind: str) -> None:
    attention, layout = build(kind), Layout((13, 1, 6), BLOCK)
    real = layout.mask.unsqueeze(-1)

    def outputs(x: Tensor) -> Tensor:
        return attention(x, layout)[0] * real

    assert gradcheck(outputs, blocks_of(draw((13, 1, 6)), layout, 1.0).requires_grad_(), fast_mode=True)


# --------------------------------------------------------------------------------------------------------------------
# What holds for all of them
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(29, 1, 7, 41, 22), (3, 2, 64)], ids=str)
@every_kind
def test_padding_and_neighbours_change_nothing(kind: str, lengths: tuple[int, ...]) -> None:
    attention, documents = build(kind, torch.float32), draw(lengths, dtype=torch.float32)
    for x, y in zip(documents, run(attention, documents), strict=True):
        torch.testing.assert_close(run(attention, [x])[0], y, rtol=2e-5, atol=2e-5)


@every_kind
def test_nothing_flows_between_documents(kind: str) -> None:
    attention, documents = build(kind), [x.requires_grad_() for x in draw((17, 12, 30))]
    found = run(attention, documents)
    for i, y in enumerate(found):
        for j, gradient in enumerate(torch.autograd.grad(y.square().sum(), documents, retain_graph=True)):
            assert bool(gradient.any()) == (i == j)


@every_kind
def test_a_single_token_is_its_own_value(kind: str) -> None:
    attention, (x,) = build(kind), draw((1,))
    torch.testing.assert_close(run(attention, [x])[0], attention.out(attention.value(x)))


@every_kind
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    """All but the bias of the keys, which no softmax over keys can see: it is there for pretrained weights."""
    attention, documents = build(kind), draw((29, 13))
    torch.cat(run(attention, documents)).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None, name
        largest = float(parameter.grad.abs().max())
        assert largest < 1e-10 if name == "key.bias" else largest > 1e-2, name


@every_kind
def test_eager_and_fused_agree(kind: str) -> None:
    attention, documents = build(kind), draw((29, 1, 13, 22))
    for one, two in zip(*(run(attention, documents, attend=attend) for attend in (eager, fused)), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_kind
def test_half_precision_is_finite_in_both_directions(kind: str, dtype: torch.dtype) -> None:
    layout = Layout((29, 1, 13, 22), BLOCK)
    attention = build(kind, dtype).train()
    x = blocks_of(draw(layout.lengths, dtype=dtype), layout, 5.0).requires_grad_()
    y, _ = attention(x, layout)
    (y * layout.mask.unsqueeze(-1)).square().mean().backward()
    assert y.dtype == dtype
    for gradient in (x.grad, *(parameter.grad for parameter in attention.parameters())):
        assert gradient is not None
        assert gradient.isfinite().all()


@every_kind
def test_autocast_keeps_to_its_precision(kind: str) -> None:
    attention, documents = build(kind, torch.float32).train(), draw((29, 1, 13), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.cat(run(attention, documents))
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in attention.parameters())


@every_kind
def test_dropout_is_for_training(kind: str) -> None:
    attention, documents = build(kind).train(), draw((29,))
    found = {}
    for rate in (0.0, 0.5):
        torch.manual_seed(5)  # the hashes are drawn first, so they are the same
        attention.dropout = rate
        found[rate] = run(attention, documents)[0]
    assert torch.equal(*found.values()) == (kind == "efficient alone")  # there are no weights to drop
    attention.eval()
    assert torch.equal(run(attention, documents)[0], run(attention, documents)[0])


@every_kind
def test_weights_are_those_that_were_used(kind: str) -> None:
    attention, layout = build(kind), Layout((29, 13), BLOCK)
    _, weights = attention(blocks_of(draw(layout.lengths), layout), layout, attend=eager)
    if kind in ("full", "blockwise"):
        rows = (layout.b, layout.n) if kind == "full" else (layout.blocks, layout.m)
        assert weights.shape == (rows[0], HEADS, rows[1], rows[1])
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        real = layout.document_mask if kind == "full" else layout.mask
        assert not weights.masked_select(~real[:, None, None].expand_as(weights)).any()
    else:
        assert weights is None


@pytest.mark.parametrize("kind", ["full", "efficient alone"])
def test_tokens_may_stand_in_any_order(kind: str) -> None:
    attention, (x,), order = build(kind), draw((29,)), torch.randperm(29)
    torch.testing.assert_close(run(attention, [x[order]])[0], run(attention, [x])[0][order])


def test_blocks_may_stand_in_any_order_but_not_tokens() -> None:
    attention, (x,) = build("blockwise"), draw((3 * BLOCK,))
    blocks, order = x.view(3, BLOCK, WIDTH), [2, 0, 1]
    y = run(attention, [x])[0]
    torch.testing.assert_close(
        run(attention, [blocks[order].flatten(0, 1)])[0], y.view(3, BLOCK, -1)[order].flatten(0, 1)
    )
    assert not torch.allclose(run(attention, [x.roll(1, 0)])[0], y.roll(1, 0))


def test_a_long_document_in_blocks_of_512() -> None:
    attention = BlockwiseAttention(6, 2).double()
    x = torch.randn(8193, 6, dtype=torch.float64)
    y = run(attention, [x], 512)[0]
    query, key, value = (
        project(x).view(8193, 2, 3).transpose(0, 1) for project in (attention.query, attention.key, attention.value)
    )
    for start in range(0, 8193, 512):
        q, k, v = (part[:, start : start + 512] for part in (query, key, value))
        mixed = torch.softmax(q @ k.mT / math.sqrt(3), -1) @ v  # [h m e]
        torch.testing.assert_close(y[start : start + 512], attention.out(mixed.transpose(0, 1).flatten(1)))
    torch.testing.assert_close(y[-1:], attention.out(attention.value(x[-1:])))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FullAttention(22, 3), "`width` must be a multiple of `heads`, got a width of 22 and 3"),
        (lambda: FullAttention(22, 0), "`width` must be a multiple of `heads`, got a width of 22 and 0 heads."),
        (lambda: LSHAttention(21, 3, local_heads=4), "`local_heads` must be between 0 and `heads`, got 4 of 3 heads."),
        (
            lambda: EfficientAttention(21, 3, local_heads=-1),
            "`local_heads` must be between 0 and `heads`, got -1 of 3 h",
        ),
        (lambda: EfficientAttention(21, 3, window=0), "`window` must be at least 1, got 0."),
        (lambda: LSHAttention(21, 3, bucket=0), "`bucket` must be at least 1, got 0."),
        (lambda: LSHAttention(21, 3, hashes=0), "`hashes` must be at least 1, got 0."),
    ],
)
def test_bad_sizes_are_refused(build: Callable[[], SelfAttention], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        build()
    assert str(refused.value).startswith(message)


def test_received_counts_real_queries_only() -> None:
    weights, mask = torch.rand(2, 3, 5, 5), torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    expected = torch.stack([weights[0].sum((0, 1)), weights[1, :, :2].sum((0, 1))])
    torch.testing.assert_close(received(weights, mask), expected)
    torch.testing.assert_close(received(weights, None)[0], expected[0])


# --------------------------------------------------------------------------------------------------------------------
# Layout
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3, 7, 11, 100])
@pytest.mark.parametrize("lengths", [(1,), (13,), (7, 14), (23, 1, 5, 19), (11, 11, 11)], ids=str)
def test_layout_packs_and_unpacks(lengths: tuple[int, ...], m: int) -> None:
    layout, b, n = Layout(lengths, m), len(lengths), max(lengths)
    m = min(m, n)
    counts = [math.ceil(length / m) for length in lengths]
    real = torch.tensor([[i < length for i in range(n)] for length in lengths])
    assert (layout.b, layout.n, layout.m, layout.blocks) == (b, n, m, sum(counts))
    assert layout.aligned == (len(set(counts)) == 1)
    assert layout.full == all(length % m == 0 for length in lengths)
    assert layout.equal == (len(set(lengths)) == 1)
    assert torch.equal(layout.document_mask, real)
    assert layout.mask.shape == (sum(counts), m)
    assert layout.mask.any(1).all()  # no block of padding alone
    assert int(layout.mask.sum()) == sum(lengths)

    for tail, dtype in (((), torch.int64), ((5,), torch.float32), ((2, 3), torch.bool)):
        x = torch.randn(b, n, *tail).to(dtype)
        packed = layout.pack(x)
        assert packed.shape == (sum(counts), m, *tail)
        assert torch.equal(packed[layout.mask], x[real])
        assert torch.equal(layout.unpack(packed)[real], x[real])

    table = torch.randn(n, 4)
    expected = torch.cat([table[:length] for length in lengths])
    assert torch.equal(layout.positions(table)[layout.mask], expected)
    assert layout.positions(torch.arange(n)).shape in ((sum(counts), m), (layout.per_document, m))


def test_layout_moves_nothing_where_it_need_not() -> None:
    layout, x = Layout((12, 11, 9), 4), torch.randn(3, 12, 2)
    assert layout.aligned
    assert not layout.full
    assert layout.pack(x).data_ptr() == layout.unpack(layout.pack(x)).data_ptr() == x.data_ptr()


def test_layout_gradients_come_back_once() -> None:
    layout, x = Layout((12, 1, 9), 5), torch.randn(3, 12, 2, requires_grad=True)
    outer = torch.randn(3, 12, 2)
    (layout.unpack(layout.pack(x)) * outer)[layout.document_mask].sum().backward()
    assert torch.equal(x.grad, outer * layout.document_mask.unsqueeze(-1))


def test_layout_says_how_much_it_left_out() -> None:
    assert repr(Layout((32, 4, 3, 1), 4)) == "Layout(b=4, n=32, m=4, blocks=11 of 32)"


# --------------------------------------------------------------------------------------------------------------------
# Cost
# --------------------------------------------------------------------------------------------------------------------


def multiplications(attention: SelfAttention, lengths: tuple[int, ...], m: int) -> int:
    """Count the multiplications in all matrix products, less those of the projections."""
    layout = Layout(lengths, m)
    x = torch.randn(layout.blocks, layout.m, WIDTH)
    projections = sum(parameter.numel() for parameter in attention.parameters() if parameter.ndim == 2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(x, layout, attend=eager)
    return counter.get_total_flops() // 2 - projections * layout.blocks * layout.m


@pytest.mark.parametrize("lengths", [(192,), (192, 24, 24, 24)], ids=["one", "mixed"])
def test_a_batch_costs_its_real_blocks(lengths: tuple[int, ...]) -> None:
    m, w, c, r, e, n = 24, 8, 6, 3, WIDTH // HEADS, sum(lengths)

    def lsh_attention(local_heads: int) -> LSHAttention:
        return LSHAttention(WIDTH, HEADS, bucket=c, hashes=r, local_heads=local_heads, window=w).eval()

    def efficient_attention(local_heads: int) -> EfficientAttention:
        return EfficientAttention(WIDTH, HEADS, local_heads=local_heads, window=w).eval()

    half = max(lengths) // (2 * c)
    assert multiplications(BlockwiseAttention(WIDTH, HEADS), lengths, m) == 2 * n * m * HEADS * e
    assert multiplications(efficient_attention(0), lengths, m) == 2 * n * e * HEADS * e
    assert multiplications(efficient_attention(1), lengths, m) == n * (2 * e * 2 * e + 6 * w * e)
    assert multiplications(efficient_attention(HEADS), lengths, m) == 6 * n * w * HEADS * e
    assert multiplications(lsh_attention(0), lengths, m) == n * (4 * c + half) * r * HEADS * e
    assert multiplications(lsh_attention(2), lengths, m) == n * ((4 * c + half) * r + 6 * w * 2) * e
    assert multiplications(FullAttention(WIDTH, HEADS), lengths, m) == 2 * len(lengths) * max(lengths) ** 2 * HEADS * e


# --------------------------------------------------------------------------------------------------------------------
# Efficient and LSH attention, by themselves
# --------------------------------------------------------------------------------------------------------------------


def test_efficient_bears_large_keys() -> None:
    layout = Layout((29, 13), BLOCK)
    query, key, value = (blocks_of(draw(layout.lengths), layout).unsqueeze(2) for _ in range(3))
    expected = efficient(query, key, value, layout)[layout.mask]
    for shift in (-5e3, 5e3):  # a softmax does not see it
        torch.testing.assert_close(
            efficient(query, key + shift, value, layout)[layout.mask], expected, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmaxes_are_in_float32(dtype: torch.dtype) -> None:
    """Sums over many tokens err by about one rounding of the result, not by roundings of large logarithms."""
    layout, eps = Layout((4000,), 40), torch.finfo(dtype).eps
    query, key, value = ((torch.randn(100, 40, 1, 4) + shift).to(dtype) for shift in (0, 0, 3))
    key = key * 8 + 1000
    expected = efficient(query.double(), key.double(), value.double(), layout)
    torch.testing.assert_close(efficient(query, key, value, layout).double(), expected, rtol=1.2 * eps, atol=0)
    buckets, ones = torch.randint(8, (100, 40, 1, 2)), torch.ones_like(value)
    torch.testing.assert_close(lsh(query, query, ones, layout, buckets, 250), ones, rtol=eps, atol=0)


def test_lsh_shares_queries_and_keys_and_keeps_no_state() -> None:
    attention = build("lsh")
    run(attention, draw((29,)))
    assert {name.partition(".")[0] for name in attention.state_dict()} == {"query", "value", "out"}
    assert not list(attention.buffers())


def test_lsh_in_one_bucket_is_full_attention_without_oneself() -> None:
    attention = LSHAttention(WIDTH, HEADS, bucket=29, local_heads=0).double().eval()
    with torch.no_grad():
        attention.query.bias.normal_().mul_(30)  # all queries point one way
    (x,) = draw((29,))
    e, value = WIDTH // HEADS, attention.value(x)
    query = attention.query(x)
    heads = []
    for q, v in zip(query.split(e, 1), value.split(e, 1), strict=True):
        products = (q @ (q / q.norm(dim=1, keepdim=True)).T / math.sqrt(e)).fill_diagonal_(-math.inf)
        heads.append(products.softmax(1) @ v)
    torch.testing.assert_close(run(attention, [x])[0], attention.out(torch.cat(heads, 1)))


def test_rotations_do_not_depend_on_how_many_are_drawn() -> None:
    for shape in ((1, 1, 1), (3, 2, 7), (2, 4, 16)):
        many = rotations(3, 100, *shape, torch.device("cpu"))
        assert many.shape == (*shape, 100)
        assert many.flatten(0, 2).unique(dim=1).shape[1] == 100
        for few in (1, 2, 15, 16, 17, 99):
            assert torch.equal(rotations(3, few, *shape, torch.device("cpu")), many[..., :few])
        assert not torch.equal(rotations(4, 100, *shape, torch.device("cpu")), many)


@pytest.mark.parametrize("bucket", [1, 3, 8])
def test_buckets_are_the_nearest_directions_of_each_document(bucket: int) -> None:
    lengths = (31, 1, 2, 16, 17)
    layout = Layout(lengths, 7)
    table = rotations(0, math.ceil(31 / (2 * bucket)), 2, 3, 5, torch.device("cpu"))
    documents = [torch.randn(n, 2, 5) for n in lengths]
    found = layout.unpack(hashed(blocks_of(documents, layout), layout, bucket, table))
    for row, document in enumerate(documents):
        for head in range(2):
            expected = naive_buckets(document[:, head], bucket, table[head])
            assert torch.equal(found[row, : len(document), head], expected)


@pytest.mark.parametrize(("n", "count"), [(1, 2), (14, 2), (15, 4), (28, 4), (29, 6), (100, 16)])
def test_a_document_has_an_even_number_of_buckets(n: int, count: int) -> None:
    assert bucket_count(n, 7) == count
    layout = Layout((n, 200), 10)
    query = torch.randn(layout.blocks, layout.m, 1, 9)
    table = rotations(0, 15, 1, 500, 9, torch.device("cpu"))
    found = layout.unpack(hashed(query, layout, 7, table))[0, :n]
    assert found.unique().tolist() == list(range(count))


def test_a_bucket_is_a_direction() -> None:
    layout = Layout((40,), 40)
    x = torch.randn(1, 1, 1, 9).expand(1, 40, 1, 9) * torch.linspace(0.1, 9, 40)[:, None, None]
    table = rotations(0, 10, 1, 8, 9, torch.device("cpu"))
    same, opposite = hashed(x, layout, 2, table), hashed(-x, layout, 2, table)
    assert (same == same[:, :1]).all()  # length does not matter
    assert ((same - opposite).abs() == 10).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_hashes_are_in_float32(autocast: bool) -> None:
    layout = Layout((400,), 100)
    query = torch.randn(4, 100, 1, 8).bfloat16()
    table = rotations(0, 50, 1, 4, 8, torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = hashed(query, layout, 4, table)
    assert torch.equal(found, hashed(query.double().float(), layout, 4, table))
    assert not torch.equal(found, hashed(query.float(), layout, 4, table.bfloat16().float()))


def test_evaluation_hashes_always_alike() -> None:
    attention, (short, long) = build("lsh"), draw((31, 200))
    before = run(attention, [short])[0]
    state = torch.random.get_rng_state()
    run(attention, [long])
    attention.train()
    run(attention, [short])
    attention.eval()
    torch.random.set_rng_state(state)
    assert torch.equal(run(attention, [short])[0], before)
    torch.testing.assert_close(run(attention, [long, short])[1], before)  # its rotations are the first of more
    fresh = build("lsh")
    fresh.load_state_dict(attention.state_dict())
    assert torch.equal(run(fresh, [short])[0], before)
    fresh.seed = 1
    assert not torch.allclose(run(fresh, [short])[0], before)


def test_training_hashes_anew_from_torchs_own_seed() -> None:
    attention, documents = build("lsh alone").train(), draw((31,))
    layout = Layout((31,), 31)

    def outputs(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return attention(documents[0][None], layout)[0]

    one, two = outputs(7), outputs()
    assert not torch.allclose(one, two)
    assert torch.equal(outputs(7), one)


def test_evaluation_may_come_first_without_autograd() -> None:
    attention, documents = build("lsh"), [x.requires_grad_() for x in draw((37,))]
    attention.seed = 123456  # rotations that no other test has drawn
    with torch.inference_mode():
        expected = run(attention, [x.detach() for x in documents])[0].clone()
    found = run(attention, documents)[0]
    found.sum().backward()
    torch.testing.assert_close(found, expected)


def test_evaluation_draws_nothing() -> None:
    attention, layout, x = build("lsh"), Layout((31,), 31), draw((31,))[0][None]
    state = torch.random.get_rng_state()
    attention(x, layout)
    assert torch.equal(torch.random.get_rng_state(), state)


# --------------------------------------------------------------------------------------------------------------------
# On a GPU
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@every_kind
def test_a_gpu_gives_the_same_and_never_waits(kind: str) -> None:
    attention, documents = build(kind, torch.float32), draw((29, 1, 13, 70), dtype=torch.float32)
    lengths = tuple(len(document) for document in documents)
    x = blocks_of(documents, Layout(lengths, BLOCK))
    expected = attention(x, Layout(lengths, BLOCK))[0]
    attention, x = attention.cuda(), x.cuda()
    attention(x, Layout(lengths, BLOCK, "cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = attention(x, Layout(lengths, BLOCK, "cuda"))[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    mask = Layout(lengths, BLOCK).mask
    torch.testing.assert_close(found.cpu()[mask], expected[mask], rtol=1e-4, atol=1e-4)
