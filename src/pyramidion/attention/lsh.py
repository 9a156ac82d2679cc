"""LSH attention: every token attends to the tokens that are hashed into its bucket (Kitaev et al. 2020)."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pyramidion.attention.layout import Layout
from pyramidion.attention.local import LocalHeads
from pyramidion.kernels.dropout import dropout as drop
from pyramidion.kernels.functions import multiply
from pyramidion.scoring import full_precision

ALONE = -1e5  # added to a token's product with itself: chosen only where there is nothing else
NOBODY = -2  # the code of a place without a token: no token's code comes near
DRAWN = 16  # rotations that are drawn at a time


class LSHAttention(LocalHeads):
    """Attend to similar tokens alone: 2 × bucket × n products a head, round and document.

    Queries that point the same way are likely to be hashed into one bucket. One projection gives queries and keys,
    the keys at unit length, so that what is near is also what is attended to. Training hashes anew at every call;
    evaluation always uses the rotations of `seed`. A document's hashes depend on nothing else in its batch.

    bucket  tokens of a chunk, and of a bucket on average
    hashes  rounds of hashing; a token attends to what it meets in any of them
    seed    of the rotations in evaluation
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        bucket: int = 64,
        hashes: int = 4,
        local_heads: int = 2,
        window: int = 128,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(width, heads, local_heads=local_heads, window=window, dropout=dropout)
        if bucket < 1:
            raise ValueError(f"`bucket` must be at least 1, got {bucket}.")
        if hashes < 1:
            raise ValueError(f"`hashes` must be at least 1, got {hashes}.")
        self.bucket, self.hashes, self.seed = bucket, hashes, seed
        del self.key  # the queries, at unit length

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Turn x [B m d] into queries, the same at unit length as keys, and values [B m h e]; x stands first."""
        x, (query, _), (value, _) = multiply(x, self.query, self.value)
        query, value = self.split(query), self.split(value)
        wide = torch.promote_types(query.dtype, torch.float32)  # in half precision a short query would vanish
        return x, query, F.normalize(query.to(wide), dim=-1).to(query.dtype), value

    def reach(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        buckets = hashed(query, layout, self.bucket, self.rotations(query, layout))  # [B m h r]
        return lsh(query, key, value, layout, buckets, self.bucket, dropout=self.rate)

    def rotations(self, query: Tensor, layout: Layout) -> Tensor:
        """Give as many rotations [h r e half] as the longest document needs."""
        half = -(-layout.n // (2 * self.bucket))
        heads, e = query.shape[2:]
        if not self.training:
            return kept_rotations(self.seed, half, heads, self.hashes, e, query.device)
        seed = int(torch.randint(2**62, (), device="cpu"))
        return rotations(seed, half, heads, self.hashes, e, query.device)


def rotations(seed: int, half: int, heads: int, hashes: int, e: int, device: torch.device) -> Tensor:
    """Draw `half` random directions for each head and round: [h r e half].

    They are drawn on the host in groups of one size, so the first ones are the same however many there are and
    whatever the device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    groups = [torch.randn(DRAWN, heads, hashes, e, generator=generator, device="cpu") for _ in range(-(-half // DRAWN))]
    table = torch.cat(groups)[:half].permute(1, 2, 3, 0).contiguous()
    return table.to(device, non_blocking=True)


kept_rotations = lru_cache(maxsize=32)(rotations)


@torch.no_grad()
def hashed(query: Tensor, layout: Layout, bucket: int, table: Tensor) -> Tensor:
    """Number the bucket of each token: query [B m h e], table [h r e half] -> [B m h r].

    A document of n tokens has the smallest even number of buckets that is at least n / bucket. A token falls into the
    one whose direction is nearest to its own: the first half are the rotations of the table, the second half their
    opposites.
    """
    half = ((layout.counts + 2 * bucket - 1) // (2 * bucket))[layout.owners][:, None, None, None]  # [B 1 1 1]
    with full_precision(query):
        turned = torch.einsum("bmhe,hrej->bmhrj", query.float(), table)
    others = torch.arange(table.shape[-1], device=layout.device) >= half.unsqueeze(-1)  # [B 1 1 1 half]
    nearest = turned.abs().masked_fill(others, -1).argmax(-1)  # [B m h r]
    opposite = turned.take_along_dim(nearest.unsqueeze(-1), -1).squeeze(-1) < 0
    return nearest + half * opposite


def lsh(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, buckets: Tensor, size: int, *, dropout: float = 0.0
) -> Tensor:
    """Attend within buckets [B m h r]: blocks [B m h e] -> [B m h e].

    In each round the tokens of a document are sorted by bucket and cut into chunks; a token meets those of its bucket
    that are in its own chunk or in the one before it. Rounds are weighted by their sums of exponentials, and a pair
    that meets in several rounds is divided among them, so the result is the softmax over all that a token meets, each
    once, without itself unless it meets nobody.
    """
    chunks = Chunks(buckets, layout, size)
    query, key, value = (chunks.take(layout.unpack(part)) for part in (query, key, value))  # [C h r c e]
    key, value = (with_previous(part) for part in (key, value))  # [C h r 2c e]

    wide = torch.promote_types(query.dtype, torch.float32)
    products = (query @ key.transpose(-1, -2)).to(wide) * query.shape[-1] ** -0.5 + chunks.bias(wide)  # [C h r c 2c]
    total = products.logsumexp(-1, keepdim=True)  # [C h r c 1]
    weights = (products - total).exp().to(value.dtype)
    mixed = drop(weights, dropout) @ value  # [C h r c e]

    share = chunks.give(total).softmax(-2)  # [B m h r 1]
    return (share * chunks.give(mixed)).sum(-2).to(value.dtype)


def with_previous(x: Tensor) -> Tensor:
    """Put the chunk before it in front of each chunk, the last one before the first: [C h r c e] -> [C h r 2c e]."""
    return torch.cat((x.roll(1, 0), x), -2)


class Chunks:
    """Sort the tokens of each document by bucket, for each head and round, and cut what is sorted into chunks.

    Tokens of one bucket keep their order, padding comes last, and chunks of padding alone are left out.

    codes    [b n h r]  bucket and chunk of each token as one number, see `bias`
    sources  [C h r c]  the token at each place, a row of [b n h]
    places   [B m h r]  the place of each token, a row of [C h r c]
    """

    def __init__(self, buckets: Tensor, layout: Layout, size: int) -> None:
        self.chunks = chunks = layout.cut(size)
        (b, n, h, r), c = (layout.b, layout.n, *buckets.shape[2:]), chunks.m
        document, token, head, turn = (torch.arange(end, device=layout.device) for end in (b, n, h, r))
        real = layout.document_mask[..., None, None]
        buckets = layout.unpack(buckets)  # [b n h r]
        order = buckets.masked_fill(~real, torch.iinfo(buckets.dtype).max).sort(dim=1, stable=True).indices
        rank = torch.empty_like(order).scatter(1, order, token[:, None, None].expand_as(order)).where(real, 0)

        rows = (document[:, None, None, None] * n + order) * h + head[:, None]  # [b n h r]
        self.sources = chunks.pack(rows).movedim(1, -1)  # [C h r c]
        chunk = chunks.starts[:, None, None, None] + rank // c
        self.places = layout.pack(((chunk * h + head[:, None]) * r + turn) * c + rank % c)  # [B m h r]
        self.codes = (2 * buckets + rank // c).int()  # [b n h r]

    def take(self, x: Tensor) -> Tensor:
        """Lay documents out in chunks, once for each round: [b n h e] -> [C h r c e]."""
        return F.embedding(self.sources, x.flatten(0, 2))

    def give(self, x: Tensor) -> Tensor:
        """Send chunks back to the tokens they came from: [C h r c e] -> [B m h r e]."""
        return F.embedding(self.places, x.flatten(0, 3))

    @torch.no_grad()
    def bias(self, dtype: torch.dtype) -> Tensor:
        """Say who meets whom, as a number to add to the products: [C h r c 2c].

        Bucket and chunk both only grow along the sorted tokens, so with 2 × bucket + chunk as its code a token meets
        those whose codes are its own or one less: same bucket, same chunk or the one before. A pair that meets in
        several rounds gets minus the logarithm of their number in each of them.
        """
        chunks, c = self.chunks, self.chunks.m
        empty, first = ~chunks.mask, chunks.rows % chunks.per_document == 0  # [C c], [C]
        codes = self.take(self.codes).masked_fill(empty[:, None, None, :, None], NOBODY)  # [C h r c r]
        around = with_previous(codes)  # [C h r 2c r]
        around[:, :, :, :c].masked_fill_(first[:, None, None, None, None], NOBODY)

        gaps = (codes[..., i].unsqueeze(-1) - around[..., i].unsqueeze(-2) for i in range(codes.shape[-1]))
        met = torch.stack([gap >> 1 == 0 for gap in gaps], 2)  # [C h r r c 2c] a gap of 0 or 1
        now = met.diagonal(dim1=2, dim2=3).movedim(-1, 2)  # [C h r c 2c]
        rounds = met.sum(2, dtype=dtype)
        alone = F.pad(torch.eye(c, device=rounds.device), (c, 0)) * ALONE  # [c 2c]
        return alone - rounds.log().masked_fill(~now, torch.inf)
