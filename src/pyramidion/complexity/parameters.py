"""How many parameters a configuration has, without building the model."""

from pyramidion.configuration_pyramidion import PyramidionConfig


def parameters(config: PyramidionConfig) -> int:
    """Count the parameters of `PyramidionForConditionalGeneration(config)`; the one table is also its head."""
    d, m = config.hidden_size, config.intermediate_size
    norm, hidden = 2 * d, d * d + d
    scorers = {"linear": d + 1, "nonlinear": hidden + d + 1}
    encoder = len(config.encoder_lengths) * (_projections(config) * d + m + d + 2 * norm)  # biases and norms
    decoder = config.decoder_layers * (8 * d + m + d + 3 * norm)
    return (
        matrix_elements(config)
        + encoder
        + decoder
        + sum(scorers.get(pooling.scorer or "", 0) for pooling in config.poolings.values())
        + (2 * norm if config.pre_norm else 0)
        + _copier(config)
    )


def _copier(config: PyramidionConfig) -> int:
    d, e, steps = config.hidden_size, config.copy_width, config.copies if config.copies > 1 else 0
    keys = 0 if config.copy_length is None else (d + 1) * e + 2 * d
    return (d + 1) * (e + 1 + steps) + keys if config.copies else 0


def matrix_elements(config: PyramidionConfig) -> int:
    """Count the elements of the matrices of attention, feed-forward and output head: what autocast casts."""
    d, m = config.hidden_size, config.intermediate_size
    encoder = len(config.encoder_lengths) * (_projections(config) * d * d + 2 * d * m)
    return encoder + config.decoder_layers * (8 * d * d + 2 * d * m) + config.vocab_size * d


def _projections(config: PyramidionConfig) -> int:
    return 3 if config.attention == "lsh" else 4  # hashing needs queries that are keys
