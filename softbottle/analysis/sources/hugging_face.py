"""Causal language models that `transformers` loads, from a folder or the hub.

PyTorch is imported here alone, when such a model is asked for.

Axes: L layers, H attention heads.
"""

import pathlib

from softbottle.analysis.capture import Capture
from softbottle.analysis.sources.reading import (
    Reading,
    Trace,
    capture,
    imported,
    token_ids,
)

_ALIKE = 1e-3  # of the largest logit, that a linear head may miss the model's own by


def from_hf(name: pathlib.Path | str, reading: Reading) -> Capture:
    """A causal language model that `transformers` loads.

    Args:
        name: a folder, or else the name of a model on the hub, which is downloaded.
        reading: how a text is read.

    Raises:
        ValueError: if a folder holds no model, the head is not softmax(h W' + b), or
            the text is too short.
        ImportError: if PyTorch or transformers is missing.
    """
    torch, transformers = imported("torch", "hf"), imported("transformers", "hf")
    folder = pathlib.Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"{name} holds no model: there is no config.json in it.")
    # A model that brings code of its own is refused, not asked about.
    where = {"pretrained_model_name_or_path": str(name), "trust_remote_code": False}
    where["local_files_only"] = folder.is_dir()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, attn_implementation="eager", use_safetensors=True
    )
    model = model.to(torch.float32).eval()

    def encode(text):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    head = model.get_output_embeddings()
    table_VD = head.weight.detach().numpy()
    bias_V = None if head.bias is None else head.bias.detach().numpy()
    ids = token_ids(reading, len(table_VD), encode)
    return capture(
        folder.name,
        table_VD,
        bias_V,
        ids,
        lambda ids_S: _trace(torch, model, ids_S),
        reading,
    )


def _trace(torch, model, ids_S):
    """One pass; the last state is what the head was given, whatever it was called."""
    head, read = model.get_output_embeddings(), []
    hook = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        with torch.no_grad():
            output = model(
                torch.as_tensor(ids_S)[None].long(),
                output_hidden_states=True,
                output_attentions=True,
                use_cache=False,
            )
            plain = head(read[0])
    finally:
        hook.remove()
    worst = float((output.logits - plain).abs().max() / plain.abs().max())
    if worst > _ALIKE:
        raise ValueError(
            f"the model changes its logits after the head (by {worst:.1%} of the "
            "largest): it is no softmax of h W' + b, and the instruments need one."
        )
    states = [*output.hidden_states[:-1], read[0]]
    # The logits up to one constant per row, which changes no normaliser's weights.
    weights_LHS = torch.stack([layer[0, :, -1] for layer in output.attentions])
    logits_LHS = weights_LHS.clamp(min=torch.finfo(torch.float32).tiny).log()
    return Trace([layer[0].numpy() for layer in states], logits_LHS.numpy())
