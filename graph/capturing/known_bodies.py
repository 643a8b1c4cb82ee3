"""Hashes of the replaced function bodies in the supported transformers versions (see source_hash).

To extend: read the new body, decide that the replacement still means the same, add the hash.
"""

from __future__ import annotations

#: Of ``expand_kv``, the same in every model file with latent attention.
EXPAND_KV = "1a4682c51686a341"

KNOWN_BODIES: dict[str, frozenset[str]] = {
    "masking_utils.create_causal_mask": frozenset({"f166aed22f4075cb"}),
    "masking_utils.create_sliding_window_causal_mask": frozenset({"8eabb88d742bd4be"}),
    "masking_utils.create_chunked_causal_mask": frozenset({"34655ed9f04cc725"}),
    "modeling_rope_utils.dynamic_rope_update": frozenset({"a52ffcdff060af27"}),
    "modeling_falcon.FalconAttention.forward": frozenset({"cdcbdeea22ff514e"}),
    "modeling_falcon.FalconAttention._split_heads": frozenset({"4618a5c6916976d7"}),
    "modeling_falcon.FalconAttention._merge_heads": frozenset({"adf1a9adb053e932"}),
    "modeling_falcon.FalconLinear.forward": frozenset({"89a9bb1b99882012"}),
    "modeling_falcon.build_alibi_tensor": frozenset({"fe0082098108e105"}),
    "modeling_bloom.BloomAttention.forward": frozenset({"b1290d405a148d7f"}),
    "modeling_bloom.BloomAttention._reshape": frozenset({"2c7a1089d46a0e0a"}),
    "modeling_bloom.BloomAttention._merge_heads": frozenset({"adf1a9adb053e932"}),
    "modeling_bloom._get_alibi_slopes": frozenset({"114ee3bf5538a070"}),
    "modeling_bloom.build_alibi_tensor": frozenset({"49ad66ac8595907c"}),
    "modeling_mpt.MptAttention.forward": frozenset({"643963922692c527"}),
    "modeling_mpt.build_mpt_alibi_tensor": frozenset({"356fbcd57acd32a6"}),
    "modeling_gpt_neo.GPTNeoSelfAttention.forward": frozenset({"cb603e2288473039"}),
    "modeling_gpt_neo.GPTNeoSelfAttention._split_heads": frozenset({"a93c41ad3d8d1f5c"}),
    "modeling_gpt_neo.GPTNeoSelfAttention._merge_heads": frozenset({"327c94bf93c5cc53"}),
    "modeling_gpt_neo.GPTNeoSelfAttention._attn": frozenset({"ca756fd4b8910ace"}),
}
