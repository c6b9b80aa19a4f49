"""The finders of the ops `packed` and `attention`, for the patch engine."""

import functools

import torch

from tidegate.packed import attention, support
from tidegate.packed.forward import prepare
from tidegate.patch import registry
from tidegate.patch.site import ForwardSite, Site, call_original

PACKED, ATTENTION = "packed", "attention"


def text_forward(padding_free, why_not, original):
    """A forward of text models that looks at its input first; why_not(text_model): why it cannot be packed."""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        arguments = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        tokens = input_ids if input_ids is not None else inputs_embeds
        if kwargs.get("sequence_parallel") is not None:  # a shard; the whole batch was checked before it was cut
            arguments["attention_mask"] = torch.empty(1, 1, 0, 0, dtype=torch.bool)  # so that no mask is made
        elif tokens is not None:  # else the original says what is missing
            refusal = functools.partial(why_not, self)
            arguments = prepare(padding_free, refusal, arguments, tokens.shape[0], tokens.shape[1])
        return original(self, **arguments)

    return forward


@functools.cache
def _text_forward(padding_free, refusal):
    """That of one instance; refusal: why the model cannot be packed at all."""

    def why_not(text_model):
        return refusal or support.state_refusal(text_model)

    def original(text_model, **arguments):
        return call_original(text_model, PACKED, **arguments)

    return text_forward(padding_free, why_not, original)


class _HandingOn:
    """A decoder layer whose linear attention is called with more keyword arguments. Nothing on the layer is changed."""

    def __init__(self, layer, keywords):
        self._layer, self._keywords = layer, keywords

    def __getattr__(self, name):
        return getattr(self._layer, name)

    def linear_attn(self, **kwargs):
        return self._layer.linear_attn(**kwargs, **self._keywords)


def _layer_forward(self, *args, cu_seq_lens_q=None, seq_idx=None, **kwargs):
    """Up to Transformers 5.5 a decoder layer keeps its keyword arguments from linear attention."""
    if cu_seq_lens_q is None:
        return call_original(self, PACKED, *args, **kwargs)
    original = self._tidegate.sites[PACKED].base
    keywords = {"cu_seq_lens_q": cu_seq_lens_q, "seq_idx": seq_idx}
    return original(_HandingOn(self, keywords), *args, **kwargs)


def find_packed(root, options):
    """The forward of every text model; and of its layers, where those would keep the boundaries for themselves."""
    sites = []
    for path, module in support.text_models(root):
        refusal = support.structure_refusal(module, options)
        state = {None: "unset", True: "on", False: "off"}[options.padding_free]
        reason = f"padding_free={state}" + (f"; packed input is refused: {refusal}" if refusal else "")
        function = _text_forward(options.padding_free, refusal)
        sites.append(ForwardSite(path, PACKED, module, "I:wrapper", function, reason=reason))
        for i, layer in enumerate(module.layers):
            if not refusal and hasattr(layer, "linear_attn") and not support.hands_keywords_on(layer):
                sites.append(ForwardSite(f"{path}.layers.{i}".lstrip("."), PACKED, layer, "I:wrapper", _layer_forward))
    return sites


find_packed.ops = (PACKED,)


def find_attention(root, options):
    """One site for every text model: its full-attention layers read one name in one config."""
    sites = []
    for path, module in support.text_models(root):
        layers = [layer.self_attn for layer in module.layers if hasattr(layer, "self_attn")]
        if not layers:
            continue
        holder = registry.holder(root, module.config, module)
        strange = next((layer for layer in layers if not support.uses_registry(layer)), None)
        chosen = getattr(module.config, "_attn_implementation", None)
        indexed = next((layer for layer in layers if hasattr(layer, "indexer")), None)
        if holder is None or strange is not None:
            why = (
                "its config is not held by the model"
                if holder is None
                else "does not call Transformers' attention functions"
            )
            sites.append(Site(path, ATTENTION, module).refuse(f"{type(strange or module).__name__}: {why}"))
        elif indexed is not None:
            sites.append(Site(path, ATTENTION, module).refuse(f"{type(indexed).__name__} attends to indexed tokens"))
        elif chosen not in (None, "sdpa", attention.NAME, attention.PATCHED):
            why = f"attention is {chosen!r}, and ours would take its place: select sdpa, or leave packed input"
            sites.append(Site(path, ATTENTION, module).refuse(why))
        else:
            names = ("_attn_implementation", attention.PATCHED)
            sites.append(registry.RegistrySite(path, ATTENTION, holder[1], module, names, attention.register))
    return sites


find_attention.ops = (ATTENTION,)
