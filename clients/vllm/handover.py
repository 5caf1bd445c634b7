"""What a router carries from a prefilling vLLM engine to a decoding one: `kv_transfer_params` with a ticket in them.

A request with `do_remote_decode` is prefilled and exported; what its output's `kv_transfer_params` say goes, as it is,
into the same prompt's request at the decoding engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf import json_format

from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb

TICKET: Final = "kvmanager_ticket"
PROMPT: Final = "kvmanager_prompt"


def prompt_digest(request: Any, tokens: int) -> str:
    """Of all that decides the KV of a request's first tokens, but for the model; hex."""
    digest = hashlib.sha256(np.asarray(request.prompt_token_ids[:tokens], "<u4").tobytes())
    lora = getattr(request, "lora_request", None)
    media = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in getattr(request, "mm_features", None) or ()
    ]
    digest.update(repr((lora.lora_name if lora else "", getattr(request, "cache_salt", None) or "", media)).encode())
    return digest.hexdigest()


def params_of(ticket: pb.Ticket, request: Any) -> dict[str, Any]:
    """What the prefilling engine answers."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        TICKET: json_format.MessageToDict(ticket, preserving_proto_field_name=True),
        PROMPT: prompt_digest(request, covered(ticket)),
    }


def covered(ticket: pb.Ticket) -> int:
    """Tokens that can be read in the end."""
    return int(ticket.expected_tokens or ticket.committed_tokens)


@dataclass(frozen=True)
class Offer:
    """What a request brings of an engine that has prefilled it. tokens: of its prompt, as the ticket says."""

    told: Mapping[str, Any]
    digest: str
    request: Any
    tokens: int

    def ticket(self) -> pb.Ticket:
        """The ticket, once it is needed: this takes its time. Raises InvalidArgument for one of another prompt."""
        try:
            ticket = json_format.ParseDict(dict(self.told), pb.Ticket())
        except (json_format.ParseError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"kv_transfer_params[{TICKET!r}] is no ticket: {error}") from error
        if covered(ticket) != self.tokens or self.digest != prompt_digest(self.request, self.tokens):
            raise InvalidArgument("the ticket is of another prompt: its bytes would be wrong here, so it is not used")
        return ticket


def offer_of(params: Mapping[str, Any], request: Any) -> Offer | None:
    """What a request brings, None when it brings nothing. Raises InvalidArgument for what can't be a ticket on it."""
    told = params.get(TICKET)
    if told is None or not params.get("do_remote_prefill"):
        return None
    try:
        tokens = int(told.get("expected_tokens") or told.get("committed_tokens") or 0)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"kv_transfer_params[{TICKET!r}] is no ticket: {error}") from error
    if not 1 <= tokens <= request.num_prompt_tokens:
        raise InvalidArgument(f"a ticket on {tokens} tokens for a prompt of {request.num_prompt_tokens}")
    return Offer(told, str(params.get(PROMPT)), request, tokens)
