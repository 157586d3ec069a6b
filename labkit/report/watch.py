"""An engine to play with: submit requests, cancel them, take steps, and see the schedule grow."""

from __future__ import annotations

import random
from typing import Any

from labkit.engine import Engine
from labkit.report import timeline
from labkit.report.style import svg
from labkit.report.widgets import is_static

STEPS = 60  # columns of the picture


def watch(engine: Engine, *, seed: int = 0) -> None:
    """Show an engine with its controls: prompt and answer lengths, priority, submit, cancel, one step or many.

    In a report, where nobody presses a button, a short run stands in its place. Cells that call this carry the tag
    `nbval-ignore-output`.
    """
    panel = Panel(engine, seed)
    if is_static():
        for prompt, answer in ((40, 12), (9, 6), (70, 8)):
            panel.submit(prompt, answer)
            panel.advance(6)
        panel.advance(40)
        panel.show()
        return
    from IPython.display import display

    display(panel.widget())


class Panel:
    """What stands behind the buttons; it works without them."""

    def __init__(self, engine: Engine, seed: int = 0):
        self.engine, self._draw = engine, random.Random(seed)
        self.names: dict[str, str] = {}
        self._begin = len(engine.log)

    def submit(self, prompt: int, answer: int, priority: int = 0) -> str:
        """A request with a random prompt; returns its id."""
        model = self.engine.loaded.model
        tokens = self._draw.choices(range(min(model.vocab_size, self.engine.loaded.tokenizer.vocab_size)), k=prompt)
        request = self.engine.request(tokens, max_tokens=answer, ignore_eos=True, priority=priority)
        self.names[request.id] = f"{len(self.names) + 1}: {prompt} + {answer}"
        return self.engine.submit(request)

    def advance(self, steps: int = 1) -> None:
        """Take steps while there is work."""
        for _ in range(steps):
            if self.engine.idle:
                return
            self.engine.step()

    def alive(self) -> list[tuple[str, str]]:
        """Name and id of whoever has not ended."""
        ended = {id for record in self.engine.log[self._begin :] for id in record.leaves}
        return [(name, id) for id, name in self.names.items() if id not in ended]

    def picture(self) -> Any:
        """The schedule so far, as a matplotlib figure."""
        log = self.engine.log[self._begin :]
        return timeline.draw(log, "Schedule", names=self.names, steps=max(STEPS, len(log)))

    def show(self) -> None:
        """Show the picture."""
        from IPython.display import SVG, display

        figure = self.picture()
        display(SVG(svg(figure)))
        _close(figure)

    def widget(self) -> Any:
        """The controls and the picture, as one widget."""
        import ipywidgets as w

        prompt = w.IntSlider(40, 1, 200, description="prompt")
        answer = w.IntSlider(12, 1, 60, description="answer")
        priority = w.IntSlider(0, 0, 3, description="priority")
        victim = w.Dropdown(options=[], description="request")
        picture = w.HTML()

        def refresh() -> None:
            victim.options = self.alive()
            if len(self.engine.log) > self._begin:
                figure = self.picture()
                picture.value = svg(figure)
                _close(figure)

        def button(text: str, work: Any) -> Any:
            made = w.Button(description=text)
            made.on_click(lambda _: (work(), refresh()))
            return made

        buttons = [
            button("Submit", lambda: self.submit(prompt.value, answer.value, priority.value)),
            button("Cancel", lambda: victim.value and self.engine.cancel(victim.value)),
            button("One step", lambda: self.advance(1)),
            button("Ten steps", lambda: self.advance(10)),
            button("To the end", lambda: self.advance(10_000)),
        ]
        return w.VBox([w.HBox([prompt, answer, priority]), w.HBox([victim]), w.HBox(buttons), picture])


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)
