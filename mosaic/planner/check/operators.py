"""The checker's own record of each shipped operator, in letters: operands, axes, attributes, FLOPs, bytes."""

from __future__ import annotations

from typing import Final

from mosaic.planner.check.notation import NONE, Rule, Way, parsed
from mosaic.planner.check.notation import Operator as _Operator


def _kv_row(width: str, layer: str = "layer", row: str = "X") -> tuple[Rule, ...]:
    """A row of keys and values: for every layer, this one among them, the same number of columns of each."""
    return ("divides", f"2*{width}", row), ("at most", f"2*{layer}*{width}+1", row), ("at most", "0", layer)


_TILES: Final[tuple[Rule, ...]] = (("at most", "1", "tiles"), ("at most", "0", "rows"))
"""A block's rows are in one tile or more."""


def _selection(sets: str = "sets") -> tuple[Rule, ...]:
    """A row of W numbers: for every slot, this one among them, and every set a count and the pages of at most k keys."""
    return (
        ("at most", "1", "page"), ("divides", "page", "k"), ("divides", f"{sets}*numbers", "W"),
        ("at most", f"slot*{sets}*numbers+1", "W"), ("at most", "0", "slot"),
    )  # fmt: skip


def _kept_rows(slot: str) -> tuple[Rule, ...]:
    """A row of W numbers: `rows` rows of Q for every slot, this one among them."""
    place: tuple[Rule, ...] = (("at most", f"{slot}*rows*Q+1", "W"), ("at most", "0", slot)) if slot else ()
    return ("at most", "1", "rows"), ("divides", "rows*Q", "W"), *place


_STATISTICS: Final = "token:int64=C maximum:float32=C second:float32=C logsumexp:float32=C entropy:float32=C"
_STATISTIC_NAMES: Final = "token maximum second logsumexp entropy"
_SAMPLE: Final = f"keys:int64=C temperature:float32=C {_STATISTICS} sample:int64=C sample_logit:float32=C"
_SAMPLE_NAMES: Final = f"{_STATISTIC_NAMES} sample sample_logit"
_SUMS: Final[tuple[Rule, ...]] = (("divides", "head_size*N", "Q"), ("divides", "Q", "head_size*N"))  # N query heads
_NUMBERS: Final = (("numbers", "k", "page"),)
_CUDNN: Final = Way(
    "cudnn", "cudnn takes one sequence without blocks, 16-bit floats and heads of 8, 16 … 128", absent=("block", "sees"),
    multiple=("head_size", 8, 128), dtypes=("q", frozenset({"bfloat16", "float16"})), elements=("cu_seqlens", 2),
)  # fmt: skip
_KEPT: Final = (
    Way(
        "hopper", "hopper takes bfloat16 and heads of 64 or 128", multiple=("head_size", 64, 128),
        dtypes=("q kv", frozenset({"bfloat16"})), capability=90, invariant="hopper_invariant",
    ),
    Way("triton"),
)  # fmt: skip
_TABLE: Final = "table:int64=S,49"
"""A row for each request."""
_OWN: Final[tuple[Rule, ...]] = (("at most", "0", "own"), ("at most", "own+1", "49"))
"""One of its columns."""
_NOTATION: Final = {
    "advance_requests": _Operator(
        f"{_TABLE} canvas:int64=R row:int64=B begin:int32=B cu_seqlens:int32=B+1 cu_rows:int32=B+1 report:int64=B,19",
        "table canvas row begin cu_seqlens cu_rows", "report table", "mask_id:n", whole="S R B",
        moved="table table canvas=B row begin cu_seqlens cu_rows report",
    ),
    "attention": _Operator(
        "q:a=*T,Q k=*S,P v=*S,P cu_seqlens=*B sees?:int32=*T,2 y:a=*T,Q", "q k v cu_seqlens sees?", "y",
        "head_size:n scale:x span?:n block?:n", "4*span*T*Q", "S",
        rules=(("divides", "head_size", "P"), ("groups", "P", "Q"), ("at most", "0", "block")), inplace="y/q",
        shown=(("B", "seqs+1"), ("P", "kv_heads*head_size")), ways=(_CUDNN, Way("triton")), invariant="triton",
    ),
    "bound_parts": _Operator(
        "chosen:int32=N,T spans:int32=B,5 cu_seqlens:int32=B+1 held_rows:int64=B,2 held:int32=E,W",
        "chosen spans cu_seqlens held_rows held", "held", "slot:n kv_heads:n heads:n", whole="B E W T",
        moved="chosen spans cu_seqlens held_rows held=2,N*heads*B",
        rules=_kv_row("kv_heads", "slot", "W"),
    ),
    "confidence": _Operator(
        "maximum:a=*M logsumexp:a=*M y:a=*M", "maximum logsumexp", "y", flops="2*M", shown=(("M", "masked"),)
    ),
    "copy": _Operator("x:a=*T y:a=*T", "x", "y", host="x y"),
    "draw_requests": _Operator(
        f"{_TABLE} row:int64=B cu_rows:int32=B+1 decided_rows:int64=M keys:int64=M temperature:float32=M top_p:float32=M "
        "top_k:int32=M cuts:uint8=M score_temperature:float32=M",
        "table row cu_rows decided_rows", "keys temperature top_p top_k cuts score_temperature", whole="S B M",
    ),
    "embedding": _Operator(
        "ids:index=T table:a=V,D y:a=T,D", "ids table", "y", moved="ids y y", host="table", shown=(("T", "tokens"),)
    ),
    "evict_tokens": _Operator(
        "before:float32=B,K,P after:float32=B,K,P listed:int32=B,P first:int32=B progress:int32=B status:uint8=T "
        "positions:int32=T cu_seqlens:int32=B+1 decoded:int32=B owner:int64=B state:float32=E,4 ranks?:float32=B,P rows:int64=T "
        "bounds:int32=B+1 total:int64=1 seen:int32=B",
        "before after listed first progress status positions cu_seqlens decoded owner state ranks?", "rows bounds total seen state",
        "alpha:x history:s threshold:s placeholders:s weight?:x keep?:n rank?:s", whole="B K P T E",
        moved="before after listed first progress status positions cu_seqlens decoded owner ranks rows bounds total seen state=B,2",
    ),
    "focus_requests": _Operator(
        f"{_TABLE} canvas:int64=R state:float32=E,4 row:int64=B cu_seqlens:int32=B+1 positions:int32=T first:int32=B "
        "listed:int32=B,block votes:uint8=T status:uint8=T progress:int32=B decoded:int32=B owner:int64=B",
        "table canvas state row cu_seqlens positions", "first listed votes status progress decoded owner state",
        "own:n block:n processed:n importance:s first_step:s reach:s history:s", whole="S R E B T",
        moved="table canvas=B,block state=2,B row cu_seqlens positions first listed votes status progress decoded owner",
    ),
    "gather_rows": _Operator(
        "x:a=S,*D rows:index=C y:a=C,*D", "x rows", "y", whole="S D", moved="rows y y", host="x"
    ),
    "grouped_linear": _Operator(
        "x:a=R,I weight=E,O,I offsets=E+1 y:a=R,O", "x weight offsets", "y", flops="2*R*I*O"
    ),
    "guide": _Operator("x:a=C,D uncond:a=C,D guidance:float32=C", "x uncond guidance", "x", flops="3*C*D"),
    "head_norm": _Operator(
        "weight=H x=*T,W", "x weight", "x", "eps:x", "4*T*W", rules=(("divides", "H", "W"),)
    ),
    "joined_attention": _Operator(
        "q:a=T,Q kv:a=R,X extents:int64=E,4 cu_extents:int32=B+1 seen:int32=B cu_seqlens:int32=B+1 positions:int32=T "
        "prefix:int32=B kept?:a=S,W kept_sums?:float32=U,V owner?:int64=B fresh?:a=T,Q fresh_sums?:float32=T,N refreshed?:int32=B "
        "y:a=T,Q",
        "q kv extents cu_extents seen cu_seqlens positions prefix kept? kept_sums? owner? fresh? fresh_sums? refreshed?",
        "y kept? kept_sums?", "layer:n slot:n rows:n kv_heads:n head_size:n scale:x block?:n", "4*rows*T*Q",
        "T Q R X E B S U W V N",
        "q extents cu_extents seen cu_seqlens positions prefix owner fresh fresh_sums refreshed y "
        "kv=B*rows,2*kv_heads*head_size kept=T,Q kept_sums=T,kv_heads",
        rules=(
            ("divides", "kv_heads*head_size", "Q"), *_kv_row("kv_heads*head_size"), ("at most", "0", "block"), *_SUMS,
            *_kept_rows("slot"), ("divides", "head_size*V", "W"), ("divides", "W", "head_size*V"),
        ),
        inplace="y/q", invariant="invariant",
    ),
    "key_change": _Operator(
        "k:floats=T,W kv:floats=R,X extents:int64=E,4 cu_extents:int32=B+1 cu_seqlens:int32=B+1 positions:int32=T change:float32=B",
        "k kv extents cu_extents cu_seqlens positions", "change", "layer:n head_size:n", "5*T*W", "T R X E B W",
        "k kv=T,W cu_extents cu_seqlens positions change", rules=(("divides", "head_size", "W"), *_kv_row("W")),
    ),
    "key_mass": _Operator(
        "q:a=T,Q kv:a=R,X extents:int64=E,4 cu_extents:int32=B+1 captured:int32=B cu_keys:int32=B+1 votes:uint8=T "
        "cu_seqlens:int32=B+1 logsumexp:float32=T,N positions?:int32=T mass:float32=sets*tiles,columns",
        "q kv extents cu_extents captured cu_keys votes cu_seqlens logsumexp positions?", "mass",
        "layer:n kv_heads:n head_size:n scale:x sets:n columns?:n span?:n statistic?:s block?:n rows?:n "
        "tiles?1:n", "2*span*T*Q", "T Q R X E B N columns",
        "q extents cu_extents captured cu_keys votes cu_seqlens logsumexp positions mass kv=columns,kv_heads*head_size*tiles",
        rules=(
            ("divides", "sets*head_size", "Q"), ("divides", "kv_heads", "sets"), *_TILES, *_SUMS,
            *_kv_row("kv_heads*head_size"),
        ),
        invariant="invariant",
    ),
    "kv_attention": _Operator(
        "q:a=T,Q kv:floats=R,X extents:int64=E,4 cu_extents:int32=B+1 seen:int32=B cu_seqlens:int32=B+1 positions:int32=T "
        "sees?:int32=T,2 y:a=T,Q", "q kv extents cu_extents seen cu_seqlens positions sees?", "y",
        "layer:n kv_heads:n head_size:n scale:x span?:n keys?:n block?:n parts?:n", "4*span*T*Q", "R X E B Q",
        "q extents cu_extents seen cu_seqlens positions sees y kv=keys,2*kv_heads*head_size",
        rules=(("divides", "kv_heads*head_size", "Q"), *_kv_row("kv_heads*head_size"), ("at most", "0", "block")),
        inplace="y/q", ways=_KEPT, invariant="invariant",
    ),
    "kv_store": _Operator(
        "k:a=T,W v:a=T,W kv:floats=R,X extents:int64=E,4 cu_extents:int32=B+1 cu_seqlens:int32=B+1 positions:int32=T",
        "k v kv extents cu_extents cu_seqlens positions", "kv", "layer:n head_size:n", whole="R X E B W",
        moved="positions k v kv=2,T,W", rules=(("divides", "head_size", "W"), *_kv_row("W")),
    ),
    "linear": _Operator("x:a=*T,I weight=O,I bias?=O y:a=*T,O", "x weight bias?", "y", flops="2*T*I*O", invariant="invariant"),
    "linear_add": _Operator("x=*T,I weight=O,I y=*T,O", "x weight y", "y", flops="2*T*I*O", invariant="invariant"),
    "minimum": _Operator("x:int32=*B other:int32=*B y:int32=*B", "x other", "y"),
    "moe_combine": _Operator("x=C,D scores=C,K order=C*K y=C*K,D", "y order scores x", "x", flops="2*C*K*D"),
    "moe_gather": _Operator("x:a=C,D order=C*top_k y:a=C*top_k,D", "x order", "y", "top_k:n"),
    "moe_route": _Operator(
        "x:a=C,D weight=E,D bias?:float32=E scores:a=C,top_k experts:int64=C,top_k", "x weight bias?",
        "scores experts", "top_k:n normalize:b scoring?:s groups?:n top_groups?:n scale?:x", "2*C*D*E",
        rules=(("at most", "top_k", "E"), ("divides", "groups", "E"), ("at most", "top_groups", "groups")),
    ),
    "moe_sort": _Operator(
        "experts=C,K order:int64=C*K offsets:int64=num_experts+1", "experts", "order offsets", "num_experts:n"
    ),
    "norm_gate_up": _Operator("x:a=T,D norm=D gate=F,D up=F,D y:a=T,F", "x norm gate up", "y", "eps:x", "4*T*D*F", invariant=NONE),
    "norm_qkv": _Operator(
        "x:a=T,D norm=D q_weight=Q,D k_weight=W,D v_weight=W,D "
        "arrivals:int32=A q_bias?=Q k_bias?=W v_bias?=W q:a=T,Q k:a=T,W v:a=T,W",
        "x norm q_weight k_weight v_weight arrivals q_bias? k_bias? v_bias?", "q k v arrivals", "eps:x", "2*T*D*Q+4*T*D*W", "Q W A",
        "x norm q_weight k_weight v_weight q_bias k_bias v_bias q k v",
        rules=(("at most", "Q", "64*A"), ("at most", "W", "64*A")),
        invariant=NONE,
    ),
    "note_focus": _Operator(
        f"{_TABLE} state:float32=E,4 row:int64=B cu_seqlens:int32=B+1 cu_rows:int32=B+1 seen:int32=B committed:uint8=M",
        "table state row cu_seqlens cu_rows seen committed", "state", "own:n processed:n first_step:s", whole="S E B M",
        moved="table state=3,B row cu_seqlens cu_rows seen committed",
    ),
    "keep_requests": _Operator(
        f"{_TABLE} row:int64=B seen:int32=B cu_seqlens:int32=B+1 extents:int64=E,4 cu_extents:int32=B+1 spans:int32=B+1,5 "
        "packed_extents:int64=B+1,4 cu_whole:int32=B+2 own_extents:int64=E,4",
        "table row seen cu_seqlens extents cu_extents", "spans packed_extents cu_whole own_extents", whole="S B E",
    ),
    "pack_keys": _Operator(
        "k:a=T,W v:a=T,W chosen:int32=N,T spans:int32=B,5 cu_seqlens:int32=B+1 extents:int64=B,4 kv:floats=R,X "
        "held?:int32=E,P held_row?:int64=B",
        "k v chosen spans cu_seqlens extents kv held? held_row?", "kv", "layer:n kv_heads:n head_size:n slot?0:n",
        whole="T B R X E P", moved="k v chosen spans cu_seqlens kv=2,T,W held=2,B*kv_heads held_row",
        rules=(("divides", "head_size*N", "W"), *_kv_row("kv_heads*head_size"), *_kv_row("kv_heads", "slot", "P")),
    ),
    "packed_attention": _Operator(
        "q:a=T,Q k:a=T,P v:a=T,P kv:floats=R,X extents:int64=B,4 held:int32=E,W held_row:int64=B spans:int32=B,5 "
        "cu_seqlens:int32=B+1 y:a=T,Q",
        "q k v kv extents held held_row spans cu_seqlens", "y",
        "layer:n slot:n kv_heads:n head_size:n scale:x span:n keys:n", "4*span*T*Q+4*keys*T*Q", "T Q P R X B E W",
        "q k v kv=keys,2*kv_heads*head_size held=2,B*kv_heads held_row spans cu_seqlens y",
        rules=(("groups", "P", "Q"), *_kv_row("kv_heads*head_size"), *_kv_row("kv_heads", "slot", "W")), inplace="y/q",
    ),
    "pack_requests": _Operator(
        f"{_TABLE} room:int64=1,8 row:int64=sequences begin:int32=sequences seen:int32=sequences cu_seqlens:int32=sequences+1 "
        "cu_rows:int32=sequences+1 cu_extents:int32=sequences+1",
        "table room", "row begin seen cu_seqlens cu_rows cu_extents table", "sequences?:n", whole="S sequences",
    ),
    "page_bounds": _Operator(
        "q:a=T,Q extrema:a=R,X page_table:int64=M cu_pages:int32=B+1 votes:uint8=T cu_seqlens:int32=B+1 positions?:int32=T "
        "bound:float32=sets*tiles,columns",
        "q extrema page_table cu_pages votes cu_seqlens positions?", "bound",
        "slot:n kv_heads:n head_size:n sets:n columns?:n page_span?:n statistic?:s block?:n rows?:n tiles?1:n",
        "4*page_span*T*Q", "T Q R X M B columns",
        "q page_table cu_pages votes cu_seqlens positions bound extrema=columns,2*kv_heads*head_size*tiles",
        rules=(
            ("divides", "sets*head_size", "Q"), ("divides", "kv_heads", "sets"), *_TILES, *_kv_row("kv_heads*head_size", "slot"),
        ),
    ),
    "page_extrema": _Operator(
        "kv:a=R,X extents:int64=E,4 cu_extents:int32=B+1 page_table:int64=M cu_pages:int32=B+1 first_page:int32=B extrema:a=S,W",
        "kv extents cu_extents page_table cu_pages first_page extrema", "extrema",
        "layer:n slot:n page:n kv_heads:n head_size:n tokens?:n", whole="R X E B M S W",
        moved="extents cu_extents page_table cu_pages first_page kv=tokens,2*kv_heads*head_size",
        rules=(
            ("at most", "1", "page"), *_kv_row("kv_heads*head_size"), *_kv_row("kv_heads*head_size", "slot", "W"),
        ),
    ),
    "perturb_score": _Operator(
        "score:float32=M keys:int64=M temperature:float32=M", "score keys temperature", "score", flops="4*M"
    ),
    "place_requests": _Operator(
        f"{_TABLE} canvas:int64=R held_extents:int64=X,4 row:int64=B begin:int32=B cu_seqlens:int32=B+1 cu_rows:int32=B+1 "
        "cu_extents:int32=B+1 positions:int32=tokens token_rows:int64=tokens rows:int64=most decided_rows:int64=most "
        "extents:int64=count,4 quota:int32=B threshold:float32=B edit_threshold:float32=B",
        "table canvas held_extents row begin cu_seqlens cu_rows cu_extents",
        "positions token_rows rows decided_rows extents quota threshold edit_threshold", "tokens?:n most?:n count?:n",
        whole="S R X B tokens most count",
        moved="table canvas=most held_extents row begin cu_seqlens cu_rows cu_extents positions token_rows rows decided_rows "
        "extents quota threshold edit_threshold",
    ),
    "prefix_attention": _Operator(
        "q:a=T,Q kv:floats=R,X extents:int64=E,4 cu_extents:int32=B+1 seen:int32=B cu_seqlens:int32=B+1 positions:int32=T y:a=T,Q "
        "logsumexp:float32=T,N", "q kv extents cu_extents seen cu_seqlens positions", "y logsumexp",
        "layer:n kv_heads:n head_size:n scale:x span?:n keys?:n block?:n parts?:n", "4*span*T*Q", "R X E B Q N",
        "q extents cu_extents seen cu_seqlens positions y logsumexp kv=keys,2*kv_heads*head_size",
        rules=(
            ("divides", "kv_heads*head_size", "Q"), *_kv_row("kv_heads*head_size"), ("at most", "0", "block"), *_SUMS,
        ),
        ways=_KEPT, invariant="invariant",
    ),
    "prefix_logsumexp": _Operator(
        "q:a=T,Q kv:a=R,X extents:int64=E,4 cu_extents:int32=B+1 captured:int32=B votes:uint8=T cu_seqlens:int32=B+1 "
        "logsumexp:float32=T,N", "q kv extents cu_extents captured votes cu_seqlens", "logsumexp",
        "layer:n kv_heads:n head_size:n scale:x span?:n keys?:n", "2*span*T*Q", "T Q R X E B N",
        "q extents cu_extents captured votes cu_seqlens logsumexp kv=keys,kv_heads*head_size",
        rules=(("divides", "kv_heads*head_size", "Q"), *_SUMS, *_kv_row("kv_heads*head_size")),
        invariant="invariant",
    ),
    "query_change": _Operator(
        "q:a=T,Q kept:a=S,W owner:int64=B prefix:int32=B cu_seqlens:int32=B+1 positions:int32=T refreshed?:int32=B "
        "change:float32=B", "q kept owner prefix cu_seqlens positions refreshed?", "change kept", "rows:n", "5*T*Q", "T Q B S W",
        "q owner prefix cu_seqlens positions refreshed change kept=T,Q", rules=_kept_rows(""),
    ),
    "read_canvas": _Operator(
        "canvas:int64=R rows:int64=C y:int64=C", "canvas rows", "y", "open_id:n", whole="R", moved="rows y y"
    ),
    "replace_rows": _Operator("y:a=M x:a=M chosen:uint8=M", "y x chosen", "y"),
    "resume_rows": _Operator(
        "chosen:int64=S bounds:int32=B+1 positions:int32=T rows:int64=M cu_rows:int32=B+1 kept:int64=size "
        "kept_positions:int32=size decided:int64=most asked:int64=most cu_decided:int32=B+1 place:int32=M",
        "chosen bounds positions rows cu_rows", "kept kept_positions decided asked cu_decided place", "size?:n most?:n",
        whole="S B T M size most", rules=(("at most", "size", "S"),),
    ),
    "reuse_requests": _Operator(
        f"{_TABLE} row:int64=B kept_row:int64=B prefix:int32=B refreshed:int32=B", "table row", "kept_row prefix refreshed",
        "own:n steps?:n", whole="S B", rules=(*_OWN, ("at most", "0", "steps")),
    ),
    "rms_norm": _Operator("x:a=*T,D weight=D y:a=*T,D", "x weight", "y", "eps:x", "4*T*D", inplace="y/x"),
    "rotary": _Operator(
        "x=T,W positions=T inv_freq=*S,R sequences?:int32=T", "x positions inv_freq sequences?", "x", "head_size:n factor?:x",
        "6*T*W",
        rules=(("divides", "head_size", "W"), ("at most", "2*R", "head_size")),
    ),
    "rotary_store": _Operator(
        "q:a=T,Q k:a=T,W v:a=T,W kv:floats=R,X extents:int64=E,4 cu_extents:int32=B+1 cu_seqlens:int32=B+1 positions:int32=T "
        "inv_freq=*S,F q_norm?=H k_norm?=H sequences?:int32=T",
        "q k v kv extents cu_extents cu_seqlens positions inv_freq q_norm? k_norm? sequences?", "q kv",
        "layer:n head_size:n eps?:x factor?:x", "10*T*Q", "R X E B W",
        "positions inv_freq q_norm k_norm sequences q k v q kv=2,T,W",
        rules=(
            ("divides", "head_size", "W"), ("divides", "W", "Q"), ("at most", "2*F", "head_size"), ("at most", "H", "head_size"),
            ("divides", "head_size", "H"), *_kv_row("W"),
        ),
    ),
    "row_nucleus": _Operator(
        "logits=C,*V keys:int64=C temperature:float32=C top_p:float32=C top_k:int32=C cuts?:uint8=C sample:int64=C "
        "probability:float32=C margin:float32=C entropy:float32=C", "logits keys temperature top_p top_k cuts?",
        "sample probability margin entropy", flops="10*C*V",
    ),
    "row_sample": _Operator(
        f"logits=C,*V {_SAMPLE}", "logits keys temperature", _SAMPLE_NAMES, flops="10*C*V"
    ),
    "row_score": _Operator(
        "maximum:float32=M second:float32=M logsumexp:float32=M entropy:float32=M sample_logit:float32=M keys?:int64=M "
        "score:float32=M", "maximum second logsumexp entropy sample_logit keys?", "score", "kind:s", "4*M", "M",
    ),
    "row_stats": _Operator(f"logits=C,*V {_STATISTICS}", "logits", _STATISTIC_NAMES, flops="6*C*V"),
    "score_keys": _Operator(
        "q:a=T,Q k:a=T,P spans:int32=B,5 cu_seqlens:int32=B+1 scores:float32=S,T", "q k spans cu_seqlens", "scores",
        "head_size:n each:n over?:s", "2*T*Q", "T B", moved="k spans cu_seqlens scores",
        rules=(("groups", "P", "Q"), ("divides", "S*head_size", "each*P"), ("divides", "each*P", "S*head_size"),
               ("divides", "each*P", "Q")),
    ),
    "select_keys": _Operator(
        "chosen:int32=N,T spans:int32=B,5 cu_seqlens:int32=B+1 held?:int32=E,W held_row?:int64=B scores:float32=N*members,T",
        "scores spans cu_seqlens held? held_row?", "chosen", "members:n pool:n pools?:s slot?0:n kv_heads?1:n", whole="T B E W",
        moved="scores spans cu_seqlens held=2,N*B held_row chosen",
        rules=(("at most", "1", "pool"), *_kv_row("kv_heads", "slot", "W")),
    ),
    "select_requests": _Operator(
        f"{_TABLE} row:int64=B seen:int32=B cu_seqlens:int32=B+1 positions:int32=T owner:int64=B captured:int32=B "
        "candidates:int32=B seen_exactly:int32=B seen_sparsely:int32=B cu_keys:int32=B+1 votes:uint8=T",
        "table row seen cu_seqlens positions", "owner captured candidates seen_exactly seen_sparsely cu_keys votes",
        "own:n carried?:b answer?:b", whole="S B T", rules=_OWN,
    ),
    "selected_attention": _Operator(
        "q:a=T,Q kv:a=R,X extents:int64=E,4 cu_extents:int32=B+1 selected:int32=S,W owner:int64=B captured:int32=B seen:int32=B "
        "cu_seqlens:int32=B+1 positions:int32=T y:a=T,Q",
        "q kv extents cu_extents selected owner captured seen cu_seqlens positions", "y",
        "layer:n slot:n sets:n k:n page:n kv_heads:n head_size:n scale:x attended?:n block?:n rows?:n tiles?1:n",
        "4*attended*T*Q", "R X E S W B Q",
        "q extents cu_extents selected=B,sets*tiles*numbers owner captured seen cu_seqlens positions y "
        "kv=B*k,2*sets*tiles*head_size",
        rules=(
            ("divides", "sets*head_size", "Q"), ("divides", "kv_heads", "sets"), *_kv_row("kv_heads*head_size"),
            ("at most", "0", "block"), *_TILES, *_selection("sets*tiles"),
        ),
        inplace="y/q", quotients=_NUMBERS,
        invariant="invariant",
    ),
    "shift_rows": _Operator("rows:a=M cu_seqlens=*B y:a=M", "rows cu_seqlens", "y"),
    "silu_mul": _Operator("gate:a=*F up:a=*F", "gate up", "gate", flops="5*F"),
    "split_linear_add": _Operator(
        "x=T,I weight=O,I y=T,O arrivals:int32=A", "x weight y arrivals", "y arrivals", flops="2*T*I*O", whole="O A",
        moved="x weight y y", rules=(("at most", "O", "64*A"),),
        invariant=NONE,
    ),
    "token_importance": _Operator(
        "q:a=T,Q kv:a=R,X extents:int64=E,4 cu_extents:int32=B+1 cu_seqlens:int32=B+1 votes:uint8=T first:int32=B "
        "listed:int32=B,P importance:float32=B,kv_heads,P", "q kv extents cu_extents cu_seqlens votes first listed", "importance",
        "layer:n kv_heads:n head_size:n scale:x pool?:n", "2*P*T*Q", "T Q R X E B P",
        "q extents cu_extents cu_seqlens votes first listed importance kv=B*P,kv_heads*head_size",
        rules=(("divides", "kv_heads*head_size", "Q"), *_kv_row("kv_heads*head_size"), ("at most", "1", "pool")),
    ),
    "top_keys": _Operator(
        "mass:float32=sets,S captured:int32=B cu_keys:int32=B+1 owner:int64=B selected:int32=E,W",
        "mass captured cu_keys owner selected", "selected", "slot:n sets:n k:n page:n ratio?:x enough?:x", whole="S B E W",
        moved="mass captured cu_keys owner selected=B,sets*numbers", rules=_selection(), quotients=_NUMBERS,
        invariant="invariant",
    ),
    "transfer": _Operator(
        "token:int64=M score:float32=M current:int64=M cu_rows:int32=B+1 quota:int32=B threshold:float32=B "
        "edit_threshold?:float32=B chosen:int64=M committed:uint8=M",
        "token score current cu_rows quota threshold edit_threshold?", "chosen committed", "rule:s mask_id:n",
        whole="M B",
    ),
    "unembed_sample": _Operator(
        f"x=C,D weight=V,D {_SAMPLE}", "x weight keys temperature", _SAMPLE_NAMES, flops="2*C*D*V", invariant=NONE
    ),
    "unembed_stats": _Operator(f"x=C,D weight=V,D {_STATISTICS}", "x weight", _STATISTIC_NAMES, flops="2*C*D*V", invariant=NONE),
    "write_canvas": _Operator(
        "token:int64=C rows:int64=C canvas:int64=R taken:uint8=C", "token rows canvas taken", "canvas", whole="R",
        moved="token rows token taken",
    ),
    "zeros": _Operator("y:int32=count", "", "y", "count:n"),
}  # fmt: skip

OPERATORS: Final = {name: parsed(operator) for name, operator in _NOTATION.items()}
