"""Form of a recipe: the most used options in groups, and all others by name."""

from collections.abc import Callable

from nicegui import ui
from nicegui.elements.mixins.value_element import ValueElement

from lit_ft.board.pages.frame import shown_errors
from lit_ft.board.recipe_text import RecipeText, as_text, from_text
from lit_ft.board.schema import PRESETS, Field, Schema, matching_preset
from lit_ft.board.texts import Texts

CALLBACKS: dict[str, dict[str, object]] = {
    "lit_callbacks.MemoryProfiler": {"sample_steps": [], "picture": False},
    "lit_callbacks.LossLedger": {},
}
"""Callbacks that a switch adds, with their arguments."""
SAMPLES = "lit_callbacks.SampleGenerations"
SAMPLE_STEPS = 50
_UNSET = ""
_OTHER = "..."
"""Choice of a class that no preset has."""
_OPEN = ("model", "method", "data", "batch")


class Form:
    """Fields that show a recipe and change it."""

    def __init__(self, schema: Schema, texts: Texts, changed: Callable[[], None]) -> None:
        """Draw the search of other options; ``show`` draws the fields.

        Args:
            schema: options of ``fit``.
            texts: texts of the page.
            changed: called when a field has changed the recipe.
        """
        self._schema, self._texts, self._changed = schema, texts, changed
        self._recipe = RecipeText()
        self._drawn: dict[str, ValueElement] = {}
        self._is_showing = False
        self._shown_classes: object = None
        with ui.element("div"):
            self._box = ui.element("div")
            with ui.expansion(texts("other options")).classes("w-full").props('data-mark="other options"'):
                self._draw_others()

    def show(self, recipe: RecipeText) -> None:
        """Show a recipe; the fields are drawn again where it names other classes."""
        self._recipe = recipe
        self._is_showing = True
        try:
            if recipe.classes() != self._shown_classes:
                self._shown_classes = recipe.classes()
                self._draw()
            for name, element in self._drawn.items():
                element.value = self._shown_value(name)
            for name, switch in self._switches.items():
                switch.value = recipe.callback(name) is not None
            self._prompts.value = "\n".join(map(str, (recipe.callback(SAMPLES) or {}).get("prompts", [])))
        finally:
            self._is_showing = False
        self._show_others()

    def _draw(self) -> None:
        self._drawn.clear()
        self._box.clear()
        with self._box:
            for group, fields in self._schema.grouped(self._recipe).items():
                expansion = ui.expansion(self._texts(f"group {group}"), value=group in _OPEN).classes("w-full")
                with expansion, ui.element("div").classes("form"):
                    for field in fields:
                        self._drawn[field.name] = self._field(field)
            with ui.expansion(self._texts("group watch")).classes("w-full"):
                self._watch_fields()
        self._find.set_options(list(self._schema.others(self._recipe)))

    def _watch_fields(self) -> None:
        self._switches = {name: ui.switch(self._texts(name)) for name in CALLBACKS}
        for name, switch in self._switches.items():
            switch.on_value_change(lambda event, name=name: self._set_callback(name, bool(event.value)))
        self._prompts = ui.textarea(label=self._texts(SAMPLES)).props("outlined autogrow rows=2 debounce=400")
        self._prompts.classes("w-full").on_value_change(lambda event: self._set_prompts(str(event.value or "")))

    def _set_callback(self, name: str, is_on: bool) -> None:
        if not self._is_showing and is_on != (self._recipe.callback(name) is not None):
            self._recipe.set_callback(name, CALLBACKS[name] if is_on else None)
            self._after_change()

    def _set_prompts(self, text: str) -> None:
        before = self._recipe.callback(SAMPLES)
        prompts = [line.strip() for line in text.splitlines() if line.strip()]
        if self._is_showing or prompts == (before or {}).get("prompts", []):
            return
        new = {"chat": True, "every_n_steps": SAMPLE_STEPS}
        self._recipe.set_callback(SAMPLES, {**(before or new), "prompts": prompts} if prompts else None)
        self._after_change()

    def _field(self, field: Field) -> ValueElement:
        label = field.name
        if field.name in PRESETS:
            nothing = self._texts({"model.peft": "full", "model.quantization": "none"}.get(field.name, "default"))
            choices = {_UNSET: nothing, **{name: name for name in PRESETS[field.name]}, _OTHER: _OTHER}
            element: ValueElement = ui.select(choices, label=label, value=_UNSET)
        elif field.choices:
            default = self._texts("default value", field.default) if field.default else self._texts("default")
            choices = {_UNSET: default, **{choice: choice for choice in field.choices}}
            element = ui.select(choices, label=label, value=_UNSET)
        else:
            element = ui.input(label=label, placeholder=field.default).props("debounce=400")
        element.props("outlined dense options-dense stack-label").props(f'data-mark="{field.name}"')
        if field.help:
            with element:
                ui.tooltip(field.help).style("max-width: 24rem; font-size: .8125rem").props("delay=300")
        element.on_value_change(lambda event: self._set(field.name, event.value))
        return element

    def _shown_value(self, name: str) -> str:
        value = self._recipe.get(name)
        if name in PRESETS:
            return _UNSET if value is None else matching_preset(name, value) or _OTHER
        text = self._as_text(name, value)
        element = self._drawn[name]
        if isinstance(element, ui.select) and isinstance(element.options, dict) and text not in element.options:
            element.set_options({**element.options, text: text})
        return text

    def _set(self, name: str, value: object) -> None:
        if self._is_showing or value == self._shown_value(name) or value == _OTHER:
            return
        with shown_errors():
            if name in PRESETS:
                self._recipe.set(name, PRESETS[name].get(str(value)))
            else:
                self._recipe.set(name, self._from_text(name, str(value or "")))
            self._after_change()

    def _as_text(self, name: str, value: object) -> str:
        is_text = isinstance(value, str) and self._schema.fields(self._recipe)[name].is_text
        return str(value) if is_text else as_text(value)

    def _from_text(self, name: str, text: str) -> object:
        if self._schema.fields(self._recipe)[name].is_text:
            return text.strip() or None
        return from_text(text)

    def _after_change(self) -> None:
        self.show(self._recipe)
        self._changed()

    # --- all other options -------------------------------------------------------------------------

    def _draw_others(self) -> None:
        texts = self._texts
        ui.label(texts("help")).classes("quiet")
        self._set_ones = ui.element("div")
        self._find = ui.select([], label=texts("find option"), with_input=True, on_change=self._show_help)
        self._find.props('outlined dense options-dense clearable data-mark="find option"').classes("w-full")
        self._help = ui.label().classes("quiet text")
        with ui.element("div").classes("option"):
            self._value = ui.input(label=texts("value")).props('outlined dense data-mark="option value"')
            ui.button(texts("set"), on_click=self._set_other).props('outline data-mark="set option"')

    def _show_help(self) -> None:
        field = self._schema.others(self._recipe).get(str(self._find.value))
        if field is None:
            self._help.text = ""
            return
        default = f" ({self._texts('default value', field.default)})" if field.default else ""
        choices = f" [{', '.join(field.choices)}]" if field.choices else ""
        self._help.text = f"{field.help}{choices}{default}"
        self._value.value = self._as_text(field.name, self._recipe.get(field.name))

    def _set_other(self) -> None:
        if self._find.value:
            with shown_errors():
                name = str(self._find.value)
                self._recipe.set(name, self._from_text(name, str(self._value.value or "")))
                self._after_change()

    def _show_others(self) -> None:
        others = self._schema.others(self._recipe)
        given = {name: self._recipe.get(name) for name in others}
        self._set_ones.clear()
        with self._set_ones:
            for name, value in given.items():
                if value is not None:
                    with ui.element("div").classes("option"):
                        ui.label(f"{name}: {as_text(value)}").classes("text")
                        remove = ui.button(icon="close", on_click=lambda name=name: self._remove(name))
                        remove.props(f'flat round dense aria-label="{self._texts("remove")}"')

    def _remove(self, name: str) -> None:
        self._recipe.set(name, None)
        self._after_change()
