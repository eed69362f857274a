"""MiniMalloc's CSV: what is read is what was written, and bad files are named by line and column."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from test_offsets import problems, relaxed

from mosaic.errors import InstanceFormatError, UsageError
from mosaic.planner.offsets import Problem, read_csv, solve, validate, write_csv
from mosaic.planner.offsets.minimalloc_csv import read_offsets


def write(tmp_path: Path, text: str, name: str = "x.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@given(problem=problems())
@relaxed
def test_round_trip(problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> None:
    if problem.aliases:
        with pytest.raises(UsageError, match="no aliases"):
            write_csv("never.csv", problem)
        return
    for name in ("p.csv", "p.csv.gz"):
        path = tmp_path_factory.mktemp("csv") / name
        solution = solve(problem, solver="first_fit")
        write_csv(path, problem, solution)
        again = read_csv(path)
        assert (again.ids, again.sizes, again.starts, again.ends) == (
            problem.ids,
            problem.sizes,
            problem.starts,
            problem.ends,
        )
        assert [again.alignment(row) for row in range(len(again))] == [
            problem.alignment(row) for row in range(len(again))
        ]
        assert again.pins is None and read_offsets(path) == solution.offsets
        assert read_csv(path, pin=True).pins == solution.offsets
        assert list(path.parent.iterdir()) == [path]


def test_columns_in_any_order_and_capacity_of_the_name(tmp_path: Path) -> None:
    path = write(tmp_path, "size,upper,id,lower\n8,4,b0,1\n", "x.64.csv")
    problem = read_csv(path)
    assert (problem.ids, problem.starts, problem.ends, problem.sizes, problem.capacity) == (
        ("b0",),
        (1,),
        (4,),
        (8,),
        64,
    )
    assert read_csv(path, capacity=32).capacity == 32


def test_lifetimes_are_half_open_under_every_name(tmp_path: Path) -> None:
    problem = read_csv(write(tmp_path, "buffer_id,start,end,size,gaps\n7,1,4,8,2-3\n"))
    assert problem.ids == (7,) and problem.ends == (4,) and problem.gaps == (((2, 3),),)


def test_ends_may_be_read_as_last_times_as_minimalloc_does(tmp_path: Path) -> None:
    problem = read_csv(write(tmp_path, "buffer_id,start,end,size,gaps\n7,1,4,8,2-2\n"), inclusive_end=True)
    assert problem.ids == (7,) and problem.ends == (5,) and problem.gaps == (((2, 3),),)


def test_a_gap_with_a_window_is_no_gap(tmp_path: Path) -> None:
    problem = read_csv(write(tmp_path, "id,lower,upper,size,gaps\na,0,9,8,1-2 3-5@0:4\nb,3,5,8,\n"))
    assert problem.gaps == (((1, 2),), ())
    assert validate(problem, solve(problem)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv: the file is empty"),
        ("id,lower,upper\n", "line 1: there is no column 'size'"),
        ("id,lower,size\n", "line 1: there is no column 'upper'"),
        ("id,lower,upper,size,start\n", "line 1: the header .* twice"),
        ("id,lower,upper,size\n0,1,2\n", "line 2: 3 fields, the header has 4"),
        ("id,lower,upper,size\n\n0,1,2,1e3\n", "line 3, column size: '1e3' is not an integer"),
        ("id,lower,upper,size\n0,1,2,4\n0,1,2,4\n", "line 3, column id: id '0' occurs on line 2 too"),
        ("id,lower,upper,size\n0,2,2,4\n", r"x.csv: buffer 0 has an empty lifetime \[2, 2\)"),
        ("id,lower,upper,size,gaps\n0,0,9,4,3:5\n", "line 2, column gaps: '3:5'"),
    ],
)
def test_bad_files_are_named_by_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InstanceFormatError, match=message) as caught:
        read_csv(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(gzip.compress(b"id"))
    with pytest.raises(InstanceFormatError, match="not a CSV text"):
        read_csv(path)
