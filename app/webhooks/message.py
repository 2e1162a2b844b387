"""Messages to receivers: signed events as Standard Webhooks specify, and sentences for Slack and Mattermost."""

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from anneal.contracts.field_types import JsonObject, format_timestamp


def message_body(delivery: Any) -> bytes:
    """Return the body of a message, in the form of its event and of its webhook's format."""
    if delivery.type.startswith("fine_tuning."):
        return openai_body(delivery.id, delivery.type, delivery.ts, delivery.event)
    return slack_body(delivery) if delivery.format == "slack" else standard_body(delivery)


def standard_body(delivery: Any) -> bytes:
    """Return the body of a message; equal for every attempt of a delivery (a row of `webhook_deliveries`)."""
    data = delivery.event
    if delivery.run is not None:
        data = {"run_id": delivery.run_id, "seq": delivery.seq, **data, "run": delivery.run}
    return json.dumps({"type": delivery.type, "timestamp": format_timestamp(delivery.ts), "data": data}).encode()


def openai_body(id: str, type: str, moment: datetime, job: JsonObject) -> bytes:
    """Return an event of a fine-tuning job as OpenAI's clients unwrap it."""
    created_at = int(moment.timestamp())
    return json.dumps({"id": id, "object": "event", "created_at": created_at, "type": type, "data": job}).encode()


def slack_body(delivery: Any) -> bytes:
    """Return a message with one sentence, which Slack and Mattermost show."""
    return json.dumps({"text": _sentence(delivery.type, delivery.event, delivery.run)}).encode()


def signed_headers(message_id: str, timestamp: int, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    """Return the headers of a message with a signature by each secret (`whsec_…`)."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    keys = [base64.b64decode(secret.removeprefix("whsec_")) for secret in secrets]
    signatures = [base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
        "content-type": "application/json",
    }


def _sentence(type: str, event: JsonObject, run: Any) -> str:
    if run is None:
        return f"Anneal: {_escape(event['message'])}"
    subject = f"Run *{_escape(run['name'])}* ({run['id']})"
    if type == "status":
        before = f"{event['from']} → " if event.get("from") else ""
        reason = f" ({_escape(event['reason'])})" if event.get("reason") else ""
        return f"{subject}: {before}{event['to']}{reason}"
    if type == "progress":
        total = f" of {event['total']:,}" if event.get("total") is not None else ""
        done = f" {event['done']:,}{total}" if event.get("done") is not None else ""
        message = f": {_escape(event['message'])}" if event.get("message") else ""
        return f"{subject}: {_escape(event.get('phase'))}{done}{message}"
    steps = f" after {run['current_step']:,} steps" if run["current_step"] else ""
    loss = f", best loss {run['best_loss']:.4g}" if run["best_loss"] is not None else ""
    error = f": {_escape(run['error_message'])}" if run["error_message"] else ""
    return f"{subject} {event['status']}{steps}{loss}{error}"


def _escape(text: object) -> str:
    """Return text without markup and mentions, such as `<!channel>` of Slack and `@channel` of Mattermost."""
    plain = " ".join(str(text).split())[:500]
    for mark, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "@\u200b")):
        plain = plain.replace(mark, escaped)
    return plain
