"""Which tool-call and reasoning parser reads the output of a chat. Knows no HTTP.

Chosen before generation, because a required tool call becomes a grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.records import SamplingParams
from holdfast.records.structured import StructuredOutputsParams
from holdfast.server.request.tools import ToolUse
from holdfast.server.settings import ServerSettings
from holdfast.text.output.reasoning import FAMILIES, ReasoningFormat, ReasoningReader, State, thinking_of
from holdfast.text.structured.syntax.regex_limits import check_repeats
from holdfast.text.structured.syntax.schemas import WHITESPACE, closed, patterns
from holdfast.text.tools.answers import AnswerReader
from holdfast.text.tools.events import Tool
from holdfast.text.tools.grammar import Freedom, calls_grammar, thoughtful_json
from holdfast.text.tools.prompt import Message, ToolFormat, shown

if TYPE_CHECKING:
    from holdfast.engine.requests.structured_output import StructuredOutput
    from holdfast.text.structured.text_matcher import TextMatcher
    from holdfast.text.tokenizer.tokenizer import Tokenizer

LOOKED_AT_CHARS = 16 << 10
"""Of arguments that no grammar held: while they are looked at no other request is."""
NO_PARSER = "none"
"""Of --reasoning-parser: thoughts stay in the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserConfig:
    use: ToolUse | None
    speech: ToolFormat | None
    """There where tools are, or were in the conversation."""
    thinking: ReasoningFormat | None
    state: State = "over"
    shows_thoughts: bool = True
    fits: Callable[[str, str], bool] | None = None
    """Whether arguments are such as the tool of this name takes: for tools that are strict, in calls that no grammar
    holds; None: it does not matter."""

    def reader(self) -> AnswerReader:
        thoughts = ReasoningReader(self.thinking, self.state) if self.thinking is not None else None
        if self.use is None or self.speech is None:
            return AnswerReader(thoughts, None)
        names = {tool.name for tool in self.use.callable}
        calls = self.speech.dialect.reader(
            names,
            None if self.use.parallel else 1,
            fits=self.fits,
            forced=self.use.forced,
            parameters={tool.name: tool.parameters for tool in self.use.callable},
        )
        return AnswerReader(thoughts, calls)

    def make_id(self) -> str:
        assert self.speech is not None
        return self.speech.dialect.make_id()

    def ended(self, reason: str | None, reader: AnswerReader) -> str | None:
        """As OpenAI has it: a call that was asked for by name is a plain stop; and so is one that a stop string cut."""
        named = self.use is not None and self.use.choice == "named"
        return "tool_calls" if reader.called and reason == "stop" and not named else reason

    def behind(self, prompt: str, *, continued: bool) -> OutputParserConfig | None:
        """The same, knowing the prompt; None where nothing is left to be read."""
        thinking = self.thinking
        state: State = "over"
        if thinking is not None:
            state = thinking.state_behind(prompt) if not continued else thinking.state_within(prompt)
        if state == "over" and self.use is None:
            return None
        return replace(self, state=state)

    def adjusted(
        self, params: SamplingParams, tokenizer: Tokenizer, structured: StructuredOutput | None
    ) -> tuple[SamplingParams, OutputParserConfig | None]:
        """Marks must be seen to be read; what must be a call is constrained to one. A grammar that was requested is for
        the answer behind the thoughts, or in place of calls; where it cannot be put there it is all of the answer: no
        thoughts are read, and calls as in vLLM where it lets them through."""
        wanted = params.structured_outputs
        forced = self.use is not None and self.use.forced
        if wanted is not None and not forced and not isinstance(_schema(wanted), dict):
            calls = None if self.use is None else replace(self, thinking=None, state="over")
            return params if calls is None else calls._showing_marks(params, tokenizer), calls
        if wanted is not None and forced:
            # It is about content, and what must be a call has none.
            params, wanted = params.replace(structured_outputs=None), None
        if wanted is not None:
            for pattern in patterns(_schema(wanted)):
                check_repeats(pattern, wanted.asked_as or wanted.kind)  # Within a grammar it is no longer seen.
        params = self._showing_marks(params, tokenizer)
        grammar = self._grammar(params.structured_outputs, tokenizer)
        if grammar is not None:
            named = "tools" if wanted is None else wanted.asked_as
            params = params.replace(structured_outputs=StructuredOutputsParams(grammar=grammar, asked_as=named))
        if structured is None or self.use is None or self.use.forced:
            return params, self
        strict = any(tool.strict for tool in self.use.tools)
        reading = replace(self, fits=partial(self._fits, structured.texts)) if strict else self
        return params, reading

    def _showing_marks(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        special = any(_special_id(mark, tokenizer) is not None for mark in self._marks)
        return params.replace(skip_special_tokens=False) if special and params.skip_special_tokens else params

    @property
    def strict_arguments(self) -> list[StructuredOutputsParams]:
        """That texts are held against, and so must be checked before."""
        if self.fits is None or self.use is None:
            return []
        return [_arguments_of(tool) for tool in self.use.tools if tool.strict]

    def _fits(self, texts: TextMatcher, name: str, arguments: str) -> bool:
        assert self.use is not None
        tool = next((tool for tool in self.use.callable if tool.name == name), None)
        if tool is None or not tool.strict:
            return tool is not None
        if len(arguments) > LOOKED_AT_CHARS:
            return False
        return texts.accepts(arguments, _arguments_of(tool))

    @property
    def _marks(self) -> tuple[str, ...]:
        marks = self.speech.call_format.marks if self.speech is not None and self.use is not None else ()
        if self.thinking is None or self.state == "over":
            return marks
        return (*marks, self.thinking.opening, self.thinking.closing)

    def _grammar(self, wanted: StructuredOutputsParams | None, tokenizer: Tokenizer) -> str | None:
        """Of an answer that must call, or may where arguments or content follow a grammar. None: there is none."""
        if self.use is None or self.speech is None:
            return self._thoughtful(wanted, tokenizer)
        freedom = None if self.use.forced and wanted is None else self._freedom(wanted)
        if freedom is None and not self.use.forced:
            return None
        return calls_grammar(
            self.speech.call_format,
            self.use.callable,
            lambda mark: _special_id(mark, tokenizer),
            parallel=self.use.parallel,
            thinking=self.thinking,
            state=self.state,
            freedom=freedom,
        )

    def _thoughtful(self, wanted: StructuredOutputsParams | None, tokenizer: Tokenizer) -> str | None:
        if wanted is None or self.thinking is None or self.state == "over":
            return None
        schema = _schema(wanted)
        assert isinstance(schema, dict)
        schema = closed(schema) if wanted.disable_additional_properties else schema
        flexible = {"whitespace_pattern": wanted.whitespace_pattern or WHITESPACE}
        spacing = {"whitespace_flexible": False} if wanted.disable_any_whitespace else flexible
        return thoughtful_json(schema, self.thinking, self.state, lambda mark: _special_id(mark, tokenizer), spacing)

    def _freedom(self, wanted: StructuredOutputsParams | None) -> Freedom | None:
        """What an answer that calls nothing may be; None: anything, and arguments too."""
        assert self.use is not None
        assert self.speech is not None
        if wanted is None:
            return Freedom(words=True) if any(tool.strict for tool in self.use.tools) else None
        schema = _schema(wanted)
        assert isinstance(schema, dict)
        return Freedom(schema=schema)


def talks_of_tools(use: ToolUse | None, messages: list[Message]) -> bool:
    """Whether there are tools, or were in the conversation."""
    return use is not None or any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def reading_of(
    template: str,
    use: ToolUse | None,
    settings: ServerSettings,
    *,
    shows_thoughts: bool,
    speech: Callable[[], ToolFormat | None] | None,
) -> OutputParserConfig | None:
    """None for a chat of which nothing is to be read but its text. `speech`: None where no tools are talked of."""
    family = settings.reasoning_parser or thinking_of(template)
    thinking = FAMILIES[family] if family not in (None, NO_PARSER) else None
    if thinking is None and speech is None:
        return None
    found = speech and speech()
    if use is not None and found is not None and not (found.has_tools or use.in_words(settings.tool_call_parser)):
        use = None
    return OutputParserConfig(use=use, speech=found, thinking=thinking, shows_thoughts=shows_thoughts)


def prepared(reading: OutputParserConfig | None, messages: list[Message]) -> tuple[list[Message], list[Any] | None]:
    """Messages and tools for the template."""
    if reading is None or reading.speech is None:
        return messages, None
    return shown(messages, [tool.given for tool in reading.use.tools] if reading.use else None, reading.speech)


def _arguments_of(tool: Tool) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=closed(tool.parameters))


def _schema(wanted: StructuredOutputsParams) -> Any:
    return {"type": "object"} if wanted.json_object else wanted.json


def _special_id(mark: str, tokenizer: Tokenizer) -> int | None:
    """Of a mark that is no text to the tokenizer; a token that is both is spelled as text."""
    found = tokenizer.convert_tokens_to_ids(mark)
    return found if isinstance(found, int) and found in tokenizer.special_ids else None
