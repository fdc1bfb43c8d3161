"""Detects the end of reasoning, so that stop strings are only searched after it."""

from __future__ import annotations

from octavo.text.answer_marks import AnswerMarks


class ReasoningWatch:
    """The state of one output: before, within or after its reasoning."""

    def __init__(self, marks: AnswerMarks) -> None:
        self._opening = marks.reasoning_opening
        self._closing = marks.reasoning_closing
        self._front = ""
        self._recent = ""
        self.is_inside = marks.begins_in_reasoning
        self.is_over = False
        self.has_reasoned = marks.begins_in_reasoning

    def add(self, text: str) -> str:
        """Adds text; returns the part that is known to be outside of reasoning."""
        if self.is_over:
            return text
        if not self.is_inside:
            self._front += text
            begun = self._front.lstrip()
            if self._opening.startswith(begun) and begun != self._opening:
                return ""
            if not begun.startswith(self._opening):
                self.is_over = True
                return self._front
            self.is_inside = self.has_reasoned = True
            text = begun[len(self._opening) :]
        self._recent += text
        place = self._recent.find(self._closing)
        if place < 0:
            self._recent = self._recent[-len(self._closing) :]
            return ""
        self.is_inside, self.is_over = False, True
        return self._recent[place + len(self._closing) :]
