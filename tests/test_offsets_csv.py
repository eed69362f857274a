"""MiniMalloc's CSV: what is read is what was written, and bad files are named by line and column."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from test_offsets import problems, relaxed

from mosaic.errors import InstanceFormatError, UsageError
from mosaic.planner.offsets import Problem, names_end, read_csv, solve, validate, write_csv
from mosaic.planner.offsets.minimalloc_csv import capacity_of_name


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
        assert again.pins is None and read_csv(path, pin=True).pins == solution.offsets
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
        ("id,lower,upper\n", r"^x.csv, line 1: there is no column 'size' in id,lower,upper$"),
        ("id,lower,size\n", r"^x.csv, line 1: there is no column 'upper' \(or 'end'\) in id,lower,size$"),
        ("id,size\n", r"^x.csv, line 1: there is no column 'lower' \(or 'start'\) in id,size$"),
        ("size\n", r"^x.csv, line 1: there is no column 'id' \(or 'buffer'\) in size$"),
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


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_lines_end_as_any_machine_ends_them(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(ending.join(["id,lower,upper,size", "", "a,0,1,4", "b,1,2,x"]).encode())
    with pytest.raises(InstanceFormatError, match="line 4, column size: 'x' is not an integer"):
        read_csv(path)
    path.write_bytes(ending.join(["id,lower,upper,size", "a,0,1,4", ""]).encode())
    assert read_csv(path).sizes == (4,)


def test_a_missing_file_and_broken_archives_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        InstanceFormatError, match=r"^cannot read .*none.csv: No such file or directory; check the path.$"
    ):
        read_csv(tmp_path / "none.csv")
    path = tmp_path / "x.csv.gz"
    for broken in (b"id,lower,upper,size", gzip.compress(b"id,lower,upper,size\n" * 99)[:-9]):
        path.write_bytes(broken)
        with pytest.raises(InstanceFormatError, match=r"^x.csv.gz: not a CSV text: "):
            read_csv(path)


def test_what_is_written_is_read_by_eye(tmp_path: Path) -> None:
    problem = Problem(
        ids=["a", "b"], sizes=[8, 4], starts=[0, 1], ends=[9, 3], gaps=[[(2, 3), (5, 8)], []], alignments=[4, 1],
        pins=[None, 8],
    )  # fmt: skip
    path = tmp_path / "x.csv"
    write_csv(path, problem)
    assert path.read_text() == "id,lower,upper,size,alignment,gaps,offset\na,0,9,8,4,2-3 5-8,\nb,1,3,4,1,,8\n"
    assert read_csv(path, pin=True) == problem and read_csv(path).pins is None
    plain = Problem(sizes=[8], starts=[0], ends=[9], alignments=2)
    write_csv(path, plain, solve(plain))
    assert path.read_text() == "id,lower,upper,size,alignment,offset\n0,0,9,8,2,0\n"
    write_csv(path, Problem(sizes=[8], starts=[0], ends=[9]))
    assert path.read_text() == "id,lower,upper,size\n0,0,9,8\n" and read_csv(path, pin=True).pins is None
    one, two = tmp_path / "one.csv.gz", tmp_path / "two.csv.gz"
    for archive in (one, two):
        write_csv(archive, plain)
    assert one.read_bytes() == two.read_bytes() and one.read_bytes()[4:8] == bytes(4)  # no time of writing
    assert gzip.decompress(one.read_bytes()) == b"id,lower,upper,size,alignment\n0,0,9,8,2\n"


def test_ids_are_integers_only_where_all_of_them_are_plain(tmp_path: Path) -> None:
    for cells, ids in (
        (("7", "10"), (7, 10)),
        (("7", "010"), ("7", "010")),
        (("7", "b"), ("7", "b")),
        (("7", "-1"), ("7", "-1")),
    ):
        text = "id,lower,upper,size\n" + "".join(f"{cell},0,1,4\n" for cell in cells)
        assert read_csv(write(tmp_path, text)).ids == ids


def test_empty_cells_are_alignments_of_one_and_no_pins(tmp_path: Path) -> None:
    path = write(tmp_path, "id,lower,upper,size,alignment,offset\na,0,1,4,,\nb,1,2,4,4,8\n")
    problem = read_csv(path, pin=True)
    assert (problem.alignments, problem.pins) == ((1, 4), (None, 8))
    with pytest.raises(InstanceFormatError, match="line 2, column size: '' is not an integer"):
        read_csv(write(tmp_path, "id,lower,upper,size\na,0,1,\n"))


def test_capacities_are_read_off_names_and_ends_off_headers(tmp_path: Path) -> None:
    names = {"A.64.csv": 64, "A.64.csv.gz": 64, "A.csv": None, "64.csv": None, "A.64.csv.txt": None, "A.6x4.csv": None}
    assert {name: capacity_of_name(name) for name in names} == names
    for header, inclusive in (("id,start,end,size", True), ("id,lower,upper,size", False), ("ID,Start,END,Size", True)):
        assert names_end(write(tmp_path, f"\n , ,\n{header}\nrest")) == inclusive


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(gzip.compress(b"id"))
    with pytest.raises(InstanceFormatError, match="not a CSV text"):
        read_csv(path)
