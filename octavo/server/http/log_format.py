"""Form of all log lines: text for people, or one JSON object a line for a collector.

Says nothing itself. Warnings and errors go to standard error, and so do the server's notices;
requests (`request_log.py`) to standard output.
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
"""Attribute of a log record that holds the named values of its JSON object."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the record names besides."""

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
    """Sets up the loggers of this process, uvicorn's too."""
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
