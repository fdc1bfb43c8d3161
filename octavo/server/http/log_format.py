"""Log format: text, or JSON lines.

Warnings, errors and notices go to stderr, requests (`request_log.py`) to stdout.
"""

from __future__ import annotations

import json
import logging
import logging.config
from datetime import UTC, datetime
from typing import Any

from octavo.server.settings import ServerSettings

ACCESS = "octavo.access"
NOTICES = "octavo.notices"
FIELDS = "fields"
"""Attribute of a log record with additional JSON fields."""


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, logger, message and additional fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(settings: ServerSettings) -> None:
    """Configures the loggers of this process, including uvicorn's."""
    is_json = settings.log_format == "json"
    json_form = {"()": JsonFormatter}
    plain = json_form if is_json else {"format": "%(message)s"}
    named = json_form if is_json else {"format": "%(levelname)s: %(message)s"}
    error, output = "ext://sys.stderr", "ext://sys.stdout"
    stream = "logging.StreamHandler"
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": plain, "named": named},
            "handlers": {
                "messages": {"class": stream, "stream": error, "formatter": "named"},
                "notices": {"class": stream, "stream": error, "formatter": "plain"},
                "requests": {"class": stream, "stream": output, "formatter": "plain"},
            },
            "root": {"handlers": ["messages"], "level": "WARNING"},
            "loggers": {
                NOTICES: {"handlers": ["notices"], "level": "INFO", "propagate": False},
                ACCESS: {"handlers": ["requests"], "level": "INFO", "propagate": False},
            },
        }
    )
