"""Which token comes next: greedy and beam search as transformers decides, on device tensors alone.

`choose` takes the logits of one step and moves every buffer on by one token. It asks the device nothing, so that a
captured graph can hold it; what would be a branch on the host is a mask here.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = -1.0e9  # what transformers adds to a score that must not win


@dataclass(frozen=True)
class Rules:
    """How a text is searched for, in numbers.

    beams       1 is greedy
    limit       most tokens of a text, the start token counted
    filler      what stands behind the end of a text
    ends        tokens that end a text
    floor       no end before a text has so many tokens, the start token counted
    ngram       no so many tokens in a row come twice; 0: they may
    banned      sequences of tokens that never come
    repetition  logits of tokens that are there already are divided by it, or multiplied where negative
    first, last tokens that must come first, and where the limit is reached
    """

    beams: int
    limit: int
    filler: int
    ends: tuple[int, ...] = ()
    floor: int = 0
    ngram: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    repetition: float = 1.0
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False


class Search:
    """The texts so far and what is known of them, in buffers that stay where they are.

    position  [1]            of the token that enters the decoder now
    live      [1]            whether any text goes on
    running   [b beams t+1]  the texts
    origin    [b beams t]    which beam holds the keys and values of a position; -1 where nothing is yet
    both      these two in one piece, as they move together
    """

    def __init__(self, rules: Rules, documents: int, vocabulary: int, device: torch.device) -> None:
        self.rules, self.documents, self.vocabulary, self.device = rules, documents, vocabulary, device
        shape = (documents, rules.beams, rules.limit)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.live = torch.ones(1, dtype=torch.bool, device=device)
        self.both = torch.full((2, *shape), -1, device=device)
        self.running, self.origin = self.both
        self.running.fill_(rules.filler)
        self.real = torch.ones(documents, 1, dtype=torch.bool, device=device)  # [b 1], False where a batch is filled up
        self.beams = torch.arange(rules.beams, device=device)
        self.ends = torch.tensor(rules.ends, dtype=torch.long, device=device)
        self.ending = self._among(rules.ends)  # [v]
        self.first, self.last = self._only(rules.first), self._only(rules.last)  # [v]
        self.banned = _split_last(rules.banned, device)

    def _among(self, tokens: tuple[int, ...]) -> Tensor:
        marks = torch.zeros(self.vocabulary, dtype=torch.bool)
        marks[list(tokens)] = True
        return marks.to(self.device)

    def _only(self, tokens: tuple[int, ...]) -> Tensor:
        return torch.zeros(self.vocabulary, device=self.device).masked_fill(~self._among(tokens), -torch.inf)

    def moving(self) -> list[Tensor]:
        """List the buffers that a step changes."""
        return [self.position, self.live, self.running, self.origin]

    def reset(self, start: Tensor) -> None:
        """Begin with the start tokens [b], where b may be fewer documents than there is room for."""
        self.position.zero_()
        self.live.fill_(True)
        self.running.fill_(self.rules.filler)
        self.origin.fill_(-1)
        self.real.fill_(False)
        self.real[: len(start)] = True
        self.running[:, :, 0] = start[0]
        self.running[: len(start), :, 0] = start.unsqueeze(1)

    def tokens(self) -> Tensor:
        """Give the tokens [b beams] that enter now, and note that their keys will be their own beam's."""
        self.origin.index_copy_(2, self.position, self.beams.expand(self.documents, -1).unsqueeze(-1))
        return self.running.index_select(2, self.position).squeeze(-1)

    def visible(self, length: int) -> Tensor:
        """Tell which keys each beam sees among the first `length` positions of all: [b 1 beams length*beams]."""
        return (self.origin[:, :, :length, None] == self.beams).flatten(2).unsqueeze(1)

    def shaped(self, scores: Tensor, length: int) -> Tensor:
        """Apply the rules to scores [b*beams v], in transformers' order; `length` is at least the tokens so far."""
        rules, position = self.rules, self.position
        texts = self.running[:, :, :length].flatten(0, 1)  # [r l]
        if rules.repetition != 1.0:
            scores = _less_of(scores, texts, position, rules.repetition)
        if 0 < rules.ngram <= length:
            scores = _no_repeat(scores, texts, position, rules.ngram)
        if rules.banned:
            scores = _never(scores, texts, position, *self.banned)
        if rules.floor > 1 and rules.ends:
            scores = scores.masked_fill(self.ending & (position + 1 < rules.floor), -torch.inf)
        if rules.first:
            scores = torch.where(position == 0, self.first, scores)
        if rules.last:
            scores = torch.where(position == rules.limit - 2, self.last, scores)
        return scores

    def ended(self, tokens: Tensor) -> Tensor:
        """Tell which tokens [...] end a text."""
        return (tokens.unsqueeze(-1) == self.ends).any(-1)

    def choose(self, logits: Tensor, length: int) -> None:
        """Put one token behind every text, by its logits [b*beams v]."""
        raise NotImplementedError

    def texts(self, documents: int) -> Tensor:
        """Give what was written about the first documents [b t]: the one place that waits for the device."""
        raise NotImplementedError


def _less_of(scores: Tensor, texts: Tensor, position: Tensor, penalty: float) -> Tensor:
    """Make tokens that a text [r l] has up to the position less likely."""
    places = torch.arange(texts.shape[1], device=texts.device)
    texts = torch.where(places <= position, texts, texts[:, :1])  # the start token stands in for what is not there yet
    there = scores.gather(1, texts)  # [r l]
    return scores.scatter(1, texts, torch.where(there < 0, there * penalty, there / penalty))


def _no_repeat(scores: Tensor, texts: Tensor, position: Tensor, size: int) -> Tensor:
    """Forbid every token that followed, in a text [r l], on the same size - 1 tokens as the text ends with."""
    steps = torch.arange(size - 1, device=texts.device)
    tail = texts.index_select(1, (position - (size - 2) + steps).clamp(min=0))  # [r size-1]
    windows = texts.unfold(1, size, 1)  # [r l-size+1 size]
    whole = torch.arange(size - 1, texts.shape[1], device=texts.device) <= position  # ends where there is text
    same = (windows[..., :-1] == tail.unsqueeze(1)).all(-1) & whole
    return _forbid(scores, windows[..., -1], same)


def _split_last(banned: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Part sequences into what stands before their last token [m l], filled up with -1 on the left, and that [m]."""
    most = max((len(sequence) for sequence in banned), default=1) - 1
    before = [(-1,) * (most - len(sequence) + 1) + sequence[:-1] for sequence in banned]
    last = [sequence[-1] for sequence in banned]
    return torch.tensor(before, device=device).long().view(len(banned), most), torch.tensor(last, device=device).long()


def _never(scores: Tensor, texts: Tensor, position: Tensor, before: Tensor, last: Tensor) -> Tensor:
    """Forbid the last tokens [m] of what a text [r l] ends with the rest of, [m t]; -1 there is any token, or none."""
    size = before.shape[1]
    places = position - (size - 1) + torch.arange(size, device=texts.device)
    tail = torch.where(places >= 0, texts.index_select(1, places.clamp(min=0)), -2).unsqueeze(1)  # [r 1 t]
    return _forbid(scores, last.expand(texts.shape[0], -1), ((tail == before) | (before == -1)).all(-1))


def _forbid(scores: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Give tokens [r m] no chance in scores [r v] where that is asked for."""
    spare = scores.shape[1]
    return F.pad(scores, (0, 1)).scatter(1, torch.where(where, tokens, spare), -torch.inf)[:, :spare]


def _never_where(score: Tensor, where: Tensor) -> Tensor:
    """Add to scores what lets none of them win, where that is asked for; rounded as transformers' are."""
    return torch.add(score, where, alpha=NEVER)


class Greedy(Search):
    """Take the likeliest token each time.

    done   [b 1]  which texts have ended
    steps  [1]    how many tokens were written before all had
    """

    def __init__(self, rules: Rules, documents: int, vocabulary: int, device: torch.device) -> None:
        super().__init__(rules, documents, vocabulary, device)
        self.done = torch.zeros(documents, 1, dtype=torch.bool, device=device)
        self.steps = torch.zeros(1, dtype=torch.long, device=device)

    def moving(self) -> list[Tensor]:
        return [*super().moving(), self.done, self.steps]

    def reset(self, start: Tensor) -> None:
        super().reset(start)
        self.done.copy_(~self.real)
        self.steps.zero_()

    def choose(self, logits: Tensor, length: int) -> None:
        token = self.shaped(logits.float(), length).argmax(-1, keepdim=True)  # [b 1]
        self.steps += self.live
        if self.rules.ends:
            token = token.masked_fill(self.done, self.rules.filler)
            self.done |= self.ended(token)
            self.live &= ~self.done.all()
        self.position += 1
        self.running.index_copy_(2, self.position, token.unsqueeze(-1))

    def texts(self, documents: int) -> Tensor:
        return self.running[:documents, 0, : int(self.steps) + 1].clone()


class Beam(Search):
    """Keep the likeliest beginnings, and the best texts that have ended.

    totals     [b beams]      log-probabilities of the running texts
    best       [b beams t+1]  texts that have ended, the best first
    scores     [b beams]      theirs: log-probability by length ** length_penalty
    lengths    [b beams]      theirs, the start token not counted
    complete   [b beams]      whether there is such a text
    open       [b 1]          whether a running text may still beat the worst of them
    penalties  [t+1]          length ** length_penalty
    """

    def __init__(self, rules: Rules, documents: int, vocabulary: int, device: torch.device) -> None:
        super().__init__(rules, documents, vocabulary, device)
        self.kept = max(2, 1 + len(rules.ends)) * rules.beams  # enough to go on with, whatever ends
        self.leading = torch.arange(self.kept, device=device) < rules.beams
        self.totals = torch.zeros(documents, rules.beams, device=device)
        self.best, self.scores = self.running.clone(), torch.zeros_like(self.totals)
        self.lengths = torch.zeros(documents, rules.beams, dtype=torch.long, device=device)
        self.complete = torch.zeros(documents, rules.beams, dtype=torch.bool, device=device)
        self.open = torch.ones(documents, 1, dtype=torch.bool, device=device)
        powers = [1.0, *(float(length) ** rules.length_penalty for length in range(1, rules.limit + 1))]
        self.penalties = torch.tensor(powers, device=device)

    def moving(self) -> list[Tensor]:
        finished = [self.best, self.scores, self.lengths, self.complete, self.open]
        return [*super().moving(), self.totals, *finished]

    def reset(self, start: Tensor) -> None:
        super().reset(start)
        self.totals.fill_(NEVER)
        self.totals[:, 0] = 0  # all beams begin alike: only the first may be continued
        self.best.copy_(self.running)
        self.scores.fill_(NEVER)
        self.lengths.zero_()
        self.complete.fill_(False)
        self.open.fill_(True)

    def choose(self, logits: Tensor, length: int) -> None:
        change = self.shaped(logits.float().log_softmax(-1), length)  # [b*beams v]
        totals = change.unflatten(0, (self.documents, -1)) + self.totals.unsqueeze(-1)
        top, places = totals.flatten(1).topk(self.kept)  # [b kept]
        parents, tokens = places // self.vocabulary, places % self.vocabulary
        last = self.position + 1
        over = self.ended(tokens) | (last >= self.rules.limit - 1)
        self._finish(top, parents, tokens, over, last, length + 1)
        self._go_on(top, parents, tokens, over, last, length + 1)
        self.position.copy_(last)
        self._judge(over)

    def _finish(self, top: Tensor, parents: Tensor, tokens: Tensor, over: Tensor, last: Tensor, width: int) -> None:
        """Let candidates [b kept] that end by the token at `last` take the places of worse texts."""
        rules, just = self.rules, over & self.leading
        score = top / self.penalties.index_select(0, last)
        if rules.early_stopping is True:
            score = _never_where(score, self.complete.all(-1, keepdim=True))
        score = _never_where(_never_where(score, ~self.open), ~just)
        scores = torch.cat([self.scores, score], 1)
        places = scores.topk(rules.beams)[1]  # [b beams]
        source = torch.cat([self.beams.expand_as(self.scores), rules.beams + parents], 1).gather(1, places)
        texts = torch.cat([self.best[..., :width], self.running[..., :width]], 1)  # [b 2*beams l]
        texts = texts.take_along_dim(source.unsqueeze(-1), 1)
        before = self.best.index_select(2, last).squeeze(-1)
        texts.index_copy_(2, last, torch.cat([before, tokens], 1).gather(1, places).unsqueeze(-1))
        lengths = torch.cat([self.lengths, last.expand_as(tokens)], 1).gather(1, places)
        complete = torch.cat([self.complete, just], 1).gather(1, places)
        self._keep(self.best[..., :width], texts)
        self._keep(self.scores, scores.gather(1, places))
        self._keep(self.lengths, lengths)
        self._keep(self.complete, complete)

    def _keep(self, buffer: Tensor, value: Tensor) -> None:
        """Write into a result, unless all texts were there already: steps that come too late change nothing."""
        torch.where(self.live.view([1] * value.ndim), value, buffer, out=buffer)

    def _go_on(self, top: Tensor, parents: Tensor, tokens: Tensor, over: Tensor, last: Tensor, width: int) -> None:
        """Continue the likeliest candidates [b kept] that have not ended."""
        totals, places = _never_where(top, over).topk(self.rules.beams)  # [b beams]
        parents = parents.gather(1, places)[..., None]  # [b beams 1]
        both = self.both[..., :width].take_along_dim(parents[None], 2)
        both[0].index_copy_(2, last, tokens.gather(1, places).unsqueeze(-1))
        self.both[..., :width] = both
        self.totals.copy_(totals)

    def _judge(self, over: Tensor) -> None:
        """Decide for which documents, and whether at all, there is something left to hope for."""
        rules = self.rules
        ahead = rules.early_stopping == "never" and rules.length_penalty > 0.0
        hoped = self.penalties[rules.limit - 1] if ahead else self.penalties.index_select(0, self.position)
        worst = self.scores.amin(1, keepdim=True).masked_fill(~self.complete, NEVER)  # [b beams]
        self.open &= (self.totals[:, :1] / hoped > worst).any(-1, keepdim=True)
        self.live &= (self.open & self.real).any() & ~(over | ~self.real).all()
        if rules.early_stopping is True:
            self.live &= ~(self.complete | ~self.real).all()

    def texts(self, documents: int) -> Tensor:
        length = int(self.lengths[:documents, 0].max())
        return self.best[:documents, 0, : length + 1].clone()


__all__ = ["Beam", "Greedy", "Rules", "Search"]
