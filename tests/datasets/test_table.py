"""`torchobj.TableDataset`: rows of CSV, Parquet, pandas, Arrow and datasets with their objects, equal to pandas."""

import multiprocessing

import pandas
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX, often
from tests.support.prefetching import Taken, all_free
from torchobj import decode
from torchobj.exceptions import ConfigError, InvalidKeyError, ObjectNotFoundError
from torchobj.warn_once import PROCESS

# Imports the datasets of Hugging Face.
pytestmark = pytest.mark.xdist_group("datasets")

COUNT = 30
NAMES = [f"images/{7 * number % COUNT:02} é.txt" for number in range(COUNT)]


def frame(base=""):
    """A table whose objects are in another order than their names; two rows have the same object."""
    names = [*NAMES, NAMES[3]]
    return pandas.DataFrame(
        {
            "label": range(len(names)),
            "image": [f"{base}{name}" for name in names],
            "weight": [0.5 * number for number in range(len(names))],
            "tag": ["x", None, "é"] * 10 + ["last"],
            "other": [f"{base}{name}" for name in reversed(names)],
        }
    )


@pytest.fixture(scope="module")
def base():
    store = torchobj.Store("memory://table")
    for name in NAMES:
        store.put(name, name.encode())
    return "memory://table/"


def local_rows(table, url_columns, base):
    """The samples of pandas: URLs replaced by the content of the objects, which is their key."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return [{**row, **{name: row[name].removeprefix(base) for name in url_columns}} for row in rows]


def decoded(row):
    return {
        name: decode.text(value) if isinstance(value, torchobj.ObjectReader) else value for name, value in row.items()
    }


def hugging_face(table):
    return pytest.importorskip("datasets").Dataset.from_pandas(table)


class OfAnotherLibrary:
    """A table as that of polars: with Arrow's interface for C, and texts as views."""

    def __init__(self, frame):
        arrow = pa.Table.from_pandas(frame)
        kinds = (pa.string_view() if kind == arrow.schema.field("image").type else kind for kind in arrow.schema.types)
        self.table = arrow.cast(pa.schema(zip(arrow.column_names, kinds, strict=True)))

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


KINDS = {"pandas": lambda table: table, "arrow": pa.Table.from_pandas, "datasets": hugging_face,
         "chunks": lambda table: pa.concat_tables([pa.Table.from_pandas(table[:9]), pa.Table.from_pandas(table[9:])]),
         "categories": lambda table: table.assign(image=table["image"].astype("category")),
         "of another library": OfAnotherLibrary,
         "batch": pa.RecordBatch.from_pandas}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_sample_is_the_row_with_its_object(base, kind):
    dataset = torchobj.TableDataset(kind(frame(base)), "image", transform=decoded)
    assert list(dataset) == local_rows(frame(base), ["image"], base)
    assert len(dataset) == COUNT + 1


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("place", ["path", "str", "url"])
def test_tables_are_read_from_files(base, tmp_path, form, place):
    file = tmp_path / f"labels é.{form}"
    frame(base).to_csv(file, index=False) if form == "csv" else frame(base).to_parquet(file)
    torchobj.Store("memory://table").put(f"tables/labels.{form}", file.read_bytes())
    table = {"path": file, "str": str(file), "url": f"memory://table/tables/labels.{form}"}[place]
    dataset = torchobj.TableDataset(table, ["image", "other"], transform=decoded)
    rows = local_rows(frame(base), ["image", "other"], base)
    # A text that is missing and an empty one are the same in a CSV.
    assert list(dataset) == [{**row, "tag": row["tag"] or ("" if form == "csv" else None)} for row in rows]
    assert f"labels{' é' if place != 'url' else ''}.{form}, {COUNT + 1} rows" in repr(dataset)


def shuffled(kind, dataset, **settings):
    torch.manual_seed(5)
    loader = kind(dataset, batch_size=4, shuffle=True, collate_fn=list, **settings)
    return [sample for batch in loader for sample in batch]


@pytest.mark.providers("s3", GCS_IN_MATRIX)
@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_shuffled_epoch_equals_pandas_and_every_read_is_announced(bucket, method):
    for name in NAMES:
        bucket.write(f"data/{name}", name.encode())
    bucket.write("labels.csv", frame().drop(columns="tag").to_csv(index=False).encode())
    settings = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
    dataset = torchobj.TableDataset(f"{bucket.url}/labels.csv", "image", f"{bucket.url}/data", transform=decoded,
                                    config=bucket.config)  # fmt: skip
    expected = shuffled(torch.utils.data.DataLoader, local_rows(frame().drop(columns="tag"), ["image"], ""))
    with Taken() as taken:
        assert shuffled(torchobj.DataLoader, dataset, **settings) == expected
    # An object of two rows may be read once for both.
    assert (taken.misses, taken.announced) == (0, COUNT + 1)
    assert all_free()


def test_a_large_table_does_not_grow_the_pickle_of_a_spawned_worker(base):
    table = frame(base).assign(text="x" * 100_000)
    dataset = torchobj.TableDataset(table, "image")
    context = multiprocessing.get_context("forkserver")
    with Taken() as taken:
        found = shuffled(torchobj.DataLoader, dataset, num_workers=1, multiprocessing_context=context)
    assert sorted(row["label"] for row in found) == list(range(COUNT + 1))
    assert taken.misses == 0


def test_relative_urls_have_a_base(base):
    table = frame()
    table.loc[2, "image"] = f"{base}{NAMES[5]}"
    for url in (base, base.removesuffix("/")):
        dataset = torchobj.TableDataset(table, "image", base_url=url, transform=decoded)
        assert [row["image"] for row in dataset] == [*NAMES[:2], NAMES[5], *NAMES[3:], NAMES[3]]


def test_columns_are_chosen_in_their_order(base):
    dataset = torchobj.TableDataset(frame(base), ["image", "other"], columns=["weight", "other", "label"])
    assert list(dataset[1]) == ["weight", "other", "label", "image"]
    assert list(torchobj.TableDataset(frame(base), "image", columns=[])[0]) == ["image"]


def test_a_dataset_of_hugging_face_keeps_its_selection(base):
    table = hugging_face(frame(base))
    for part in (
        table.select([4, 2, 4]),
        table.shuffle(seed=1),
        table.filter(lambda row: row["label"] > 20),
        table.select([]),
    ):
        dataset = torchobj.TableDataset(part, "image", transform=decoded)
        assert [row["label"] for row in dataset] == part["label"][:]


@pytest.mark.parametrize(("value", "message"), [
    (None, "the URL is null; every row must have one"),
    ("", "the URL is empty; every row must have one"),
    ("a/b.jpg", "'a/b.jpg' is not a URL such as s3://bucket/key; for relative URLs pass base_url"),
    ("ftp://host/a", "scheme 'ftp', expected s3://"),
    ("s3://bucket", "s3://bucket: names no object"),
    ("s3:///key", "no bucket"),
    ("s3://user:secret@bucket/key", "must have no user and password"),
    ("file://a/b", "a file URL has three slashes"),
])  # fmt: skip
def test_a_missing_or_malformed_url_is_named_with_its_row_and_column(value, message):
    urls = ["s3://bucket/1", "gs://b/2", "gcs://b/3", "file:///a/4", "memory://m/5", value]
    with pytest.raises(ConfigError, match=r"^the table: row 5, column 'image': ") as raised:
        torchobj.TableDataset(pa.table({"image": urls, "label": range(6)}), "image")
    assert message in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_missing_url_is_an_error_with_a_base_and_in_files_too(tmp_path):
    for value, problem in ((None, "null"), ("", "empty")):
        with pytest.raises(ConfigError, match=f"the DataFrame: row 1, column 'image': the URL is {problem}"):
            torchobj.TableDataset(pandas.DataFrame({"image": ["a", value]}), "image", base_url="memory://table/")
    (tmp_path / "labels.csv").write_text("image,label\nmemory://table/a,1\n,2\n")
    with pytest.raises(ConfigError, match=r"labels\.csv: row 1, column 'image': the URL is empty"):
        torchobj.TableDataset(tmp_path / "labels.csv", "image")
    with pytest.raises(ConfigError, match="row 0, column 'image': the URL is null"):
        torchobj.TableDataset(pa.table({"image": pa.nulls(2)}), "image")


def test_a_table_in_a_bucket_names_no_files_of_this_machine(bucket):
    for url in ("file:///etc/passwd", "memory://table/a"):
        bucket.write("labels.csv", f"image\n{bucket.url}/a\n{url}\n".encode())
        with pytest.raises(
            ConfigError, match="row 1, column 'image': a table in a bucket must not name objects of this"
        ):
            torchobj.TableDataset(f"{bucket.url}/labels.csv", "image", config=bucket.config)


def test_an_object_that_is_missing_or_cannot_be_decoded_is_named(base, caplog, monkeypatch):
    monkeypatch.setattr(PROCESS, "_once", {})
    table = pandas.DataFrame({"image": [f"{base}{NAMES[0]}", f"{base}missing", f"{base}{NAMES[1]}"]})
    with pytest.raises(ObjectNotFoundError, match=f"{base}missing"):
        torchobj.TableDataset(table, "image")[1]
    dataset = torchobj.TableDataset(table, "image", transform=decoded, on_error="replace")
    assert [row["image"] for row in dataset] == [NAMES[0], NAMES[1], NAMES[1]]
    assert f"sample 1, {base}missing, was replaced" in caplog.text
    with pytest.raises(ValueError, match="Expecting value") as raised:
        torchobj.TableDataset(table, "image", transform=lambda row: decode.json(row["image"]))[2]
    assert raised.value.__notes__ == [f"in build of sample 2, {base}{NAMES[1]}"]


@pytest.mark.parametrize(("settings", "message"), [
    ({"url_columns": "url"}, "the DataFrame: no column 'url'; its columns are label, image, weight, tag, other"),
    ({"url_columns": []}, r"url_columns=\[\]: must be the name of a column"),
    ({"url_columns": ["image", 3]}, "must be the name of a column"),
    ({"url_columns": "label"}, "column 'label' is of type int64: URLs must be strings"),
    ({"url_columns": "image", "columns": "label"}, "columns='label': must be"),
    ({"url_columns": "image", "columns": ["size"]}, "no column 'size'"),
    ({"url_columns": "image", "base_url": "images/"}, "not a URL"),
    ({"url_columns": "image", "transform": 3}, "transform=3: must be callable"),
    ({"url_columns": "image", "table": [1]}, "must be the path or URL of a CSV or Parquet file, a pandas"),
])  # fmt: skip
def test_wrong_arguments_are_refused_at_once(base, settings, message):
    with pytest.raises(ConfigError, match=message):
        torchobj.TableDataset(**{"table": frame(base), **settings})


@pytest.mark.parametrize("name", [None, "number"])
@pytest.mark.parametrize("kind", ["file", "arrow"])
def test_the_index_of_pandas_is_no_column(base, tmp_path, name, kind):
    indexed = frame(base)[["image", "label"]].set_index(pandas.Index(range(5, COUNT + 6), name=name))
    table = pa.Table.from_pandas(indexed, preserve_index=True)
    assert table.num_columns == 3
    if kind == "file":
        pa.parquet.write_table(table, tmp_path / "a.parquet")
        table = tmp_path / "a.parquet"
    assert list(torchobj.TableDataset(table, "image")[0]) == ["image", "label"]
    chosen = name or "__index_level_0__"
    assert torchobj.TableDataset(table, "image", columns=[chosen])[1][chosen] == 6


def test_an_index_of_urls_is_a_column(base):
    table = pa.Table.from_pandas(frame(base)[["image", "label"]].set_index("image"))
    assert list(torchobj.TableDataset(table, "image")[0]) == ["label", "image"]


@pytest.mark.parametrize("separator", ["\t", ";"])
def test_a_csv_with_another_separator_is_named_with_the_next_step(tmp_path, separator):
    (tmp_path / "a.csv").write_text(f"url{separator}label\ns3://b/k{separator}1\n")
    with pytest.raises(ConfigError, match=r"no column 'url'.*tabs or semicolons: read them with pandas\.read_csv"):
        torchobj.TableDataset(tmp_path / "a.csv", "url")


def test_files_that_are_no_tables_are_named(tmp_path):
    for name, data, message in (
        ("a.parquet", b"image\n", r"a\.parquet: not a Parquet file: it does not start with b'PAR1'"),
        ("b.parquet", b"PAR1" * 9, r"b\.parquet: not a CSV or Parquet file, or damaged"),
        ("c.csv", b"", r"c\.csv: not a CSV or Parquet file, or damaged: Empty CSV file"),
        ("d.csv", b"a,b\n1\n", r"d\.csv: not a CSV or Parquet file, or damaged: CSV parse error"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            torchobj.TableDataset(tmp_path / name, "image")
    with pytest.raises(FileNotFoundError):
        torchobj.TableDataset(tmp_path / "missing.csv", "image")
    with pytest.raises(ConfigError, match="the table: 2 columns 'image'"):
        torchobj.TableDataset(pa.table([["a"], ["b"]], names=["image", "image"]), "image")


URL = "memory://table/images/00 é.txt"


@pytest.mark.parametrize("form", often(1, ["arrow", "csv", "pandas", "parquet"]))
def test_a_table_with_twenty_thousand_columns_is_read(base, tmp_path, form):
    # A test that ends: with a list of names for each column this takes an hour.
    columns = {"url": [URL], **{f"c{number}": [number] for number in range(20_000)}}
    table = pa.table(columns)
    if form == "csv":
        table = tmp_path / "wide.csv"
        pa.csv.write_csv(pa.table(columns), table)
    elif form == "pandas":
        table = pandas.DataFrame(columns)
    elif form == "parquet":
        table = tmp_path / "wide.parquet"
        pa.parquet.write_table(pa.table(columns), table)
    dataset = torchobj.TableDataset(table, "url")
    assert dataset[0]["c19999"] == 19_999
    assert len(dataset[0]) == 20_001


@pytest.mark.parametrize(
    "values", [["a", 1], [1, "a"], [b"a", 1], [{"a": 1}, 2], [[1], 2], [2**70, 1], [object(), object()]]
)
def test_a_dataframe_column_of_mixed_values_is_named_and_can_be_left_out(base, values):
    table = pandas.DataFrame({"url": [URL, URL], "c": pandas.Series(values, dtype=object), "x": [1, 2]})
    with pytest.raises(ConfigError, match="the DataFrame: column 'c' has values of different types.*astype"):
        torchobj.TableDataset(table, "url")
    assert torchobj.TableDataset(table, "url", columns=["x"])[1]["x"] == 2


@pytest.mark.parametrize("names", [range(2), [0, "url"], [("a", "b"), "url"], [None, "url"]])
def test_names_of_columns_that_are_no_strings_are_an_error_with_the_next_step(base, names):
    table = pandas.DataFrame([[URL, URL]])
    table.columns = list(names)
    with pytest.raises(ConfigError, match=r"the DataFrame: the name of a column is .*frame\.rename\(columns=str\)"):
        torchobj.TableDataset(table, "url")
    with pytest.raises(ConfigError, match="url_columns=0: must be the name of a column.*names are strings"):
        torchobj.TableDataset(table, 0)
    assert len(torchobj.TableDataset(table.rename(columns=str), str(names[1]))) == 1


def test_a_dataframe_with_a_column_twice_is_an_error_that_names_it(base):
    table = pandas.DataFrame([[URL, 1, 2]], columns=["url", "x", "x"])
    with pytest.raises(ConfigError, match="the DataFrame: 2 columns 'x'"):
        torchobj.TableDataset(table, "url")
    assert list(torchobj.TableDataset(table, "url", columns=[])[0]) == ["url"]


def test_columns_and_classes_are_those_of_the_samples(base):
    table = frame(base).assign(animal=(["dog", "cat", None] * 11)[: COUNT + 1])
    dataset = torchobj.TableDataset(table, "image", columns=["label", "animal", "weight"])
    assert dataset.column("label") == list(range(COUNT + 1))
    assert dataset.column("animal") == [row["animal"] for row in dataset]
    assert dataset.table.column_names == ["label", "animal", "weight", "image"]
    assert dataset.table["image"].to_pylist() == table["image"].tolist()
    assert dataset.class_to_idx("animal") == {"cat": 0, "dog": 1}
    assert dataset.class_to_idx("label")[30] == 30
    for call in (dataset.column, dataset.class_to_idx):
        with pytest.raises(
            ConfigError, match="the DataFrame: no column 'tag'; its columns are label, animal, weight, image"
        ):
            call("tag")


def test_categories_and_class_labels_keep_their_numbers(base):
    kind = pandas.CategoricalDtype(["z", "a", "unused"], ordered=True)
    table = pandas.DataFrame({"url": [URL] * 2, "kind": pandas.Series(["a", "z"], dtype=kind)})
    assert torchobj.TableDataset(table, "url").class_to_idx("kind") == {"z": 0, "a": 1, "unused": 2}
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"url": datasets.Value("string"), "kind": datasets.ClassLabel(names=["z", "a"])})
    labelled = datasets.Dataset.from_dict({"url": [URL] * 2, "kind": [1, 0]}, features)
    dataset = torchobj.TableDataset(labelled, "url")
    assert (dataset.class_to_idx("kind"), dataset.column("kind")) == ({"z": 0, "a": 1}, [1, 0])


def test_values_without_an_order_are_no_classes(base):
    table = pa.table({"url": [URL] * 2, "c": [{"a": 1}, {"a": 2}]})
    with pytest.raises(ConfigError, match="the table: the values of column 'c' are no classes"):
        torchobj.TableDataset(table, "url").class_to_idx("c")


def test_a_small_parquet_file_that_decodes_to_more_than_memory_is_an_error(tmp_path):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), ["x" * (1 << 20)])
    options = {"compression": "zstd", "write_statistics": False, "store_schema": False}
    pa.parquet.write_table(pa.table({"url": texts}), tmp_path / "a.parquet", **options)
    with pytest.raises(ConfigError, match=r"a\.parquet: not a CSV or Parquet file, or damaged: .*more than 2147483648"):
        torchobj.TableDataset(tmp_path / "a.parquet", "url")


def csv_file(tmp_path, text, encoding="utf-8"):
    (tmp_path / "a.csv").write_bytes(text.encode(encoding))
    return tmp_path / "a.csv"


@pytest.mark.parametrize(
    "encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "shift_jis"]
)
def test_a_csv_in_another_encoding_is_named_and_read_on_request(base, tmp_path, encoding):
    word = "ローマ" if encoding == "shift_jis" else "café"
    table = csv_file(tmp_path, f"url,{word}\n" + f'{base}a,"{word}"\n' * 3, encoding)
    if encoding != "utf-8-sig":
        with pytest.raises(ConfigError, match=r"a\.csv: .*pass encoding="):
            torchobj.TableDataset(table, "url")
    chosen = None if encoding == "utf-8-sig" else encoding
    assert torchobj.TableDataset(table, "url", encoding=chosen).column(word) == [word] * 3


def test_a_column_that_is_not_utf_8_is_named_wherever_the_byte_is(base, tmp_path):
    for count in (0, 300_000):
        table = csv_file(tmp_path, "url,word\n" + f"{base}a,b\n" * count + f"{base}a,café\n", "latin-1")
        with pytest.raises(ConfigError, match=r"a\.csv: column 'word': it is not text in UTF-8; pass encoding="):
            torchobj.TableDataset(table, "url")
    with pytest.raises(ConfigError, match=r"a\.csv: it is not text in UTF-8"):
        torchobj.TableDataset(table, "url", column_types={"word": str})
    with pytest.raises(ConfigError, match=r"a\.csv: it is not text in ascii"):
        torchobj.TableDataset(table, "url", encoding="ascii")


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"BZh9", "bzip2"),
        (b"\xfd7zXZ\0", "xz"),
        (b"PK\x03\x04", "zip"),
    ],
)
def test_a_compressed_table_is_named(tmp_path, start, name):
    (tmp_path / "a.csv").write_bytes(start + b"\x00\x01rest\n")
    with pytest.raises(ConfigError, match=rf"a\.csv: .*{name}.*: must be a CSV or Parquet file"):
        torchobj.TableDataset(tmp_path / "a.csv", "url")


def test_types_of_columns_are_those_that_were_asked_for(base, tmp_path):
    table = csv_file(tmp_path, f"url,id,n,day\n{base}a,0001,7,2020-01-02\n{base}b,0002,,2020-01-03\n")
    assert torchobj.TableDataset(table, "url").column("id") == [1, 2]
    types = {"id": str, "n": pa.float32(), "day": "string"}
    dataset = torchobj.TableDataset(table, "url", column_types=types)
    assert (dataset.column("id"), dataset.column("day")) == (["0001", "0002"], ["2020-01-02", "2020-01-03"])
    assert dataset.table.schema.field("n").type == pa.float32()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoding": "none-such"}, "encoding='none-such': must be the name of an encoding"),
        ({"encoding": 5}, "encoding=5: must be"),
        ({"column_types": ["id"]}, "column_types=.*must be types by the names"),
        ({"column_types": {"id": "none-such"}}, "column_types: 'none-such' is no type"),
        ({"column_types": {"id": list}}, "column_types: .* is no type"),
        ({"column_types": {"absent": str}}, r"column_types: .*a\.csv has no column 'absent'; its columns are url, id"),
        ({"column_types": {"id": int}}, r"a\.csv: .*CSV conversion error to int64: invalid value 'x'"),
        ({"column_types": {"id": str}, "table": pa.table({"url": [URL]})}, "are for a CSV"),
    ],
)
def test_wrong_encodings_and_types_are_refused(base, tmp_path, settings, message):
    table = csv_file(tmp_path, f"url,id\n{base}a,x\n")
    with pytest.raises(ConfigError, match=message):
        torchobj.TableDataset(**{"table": table, "url_columns": "url", **settings})


def test_dates_of_a_csv_are_named_by_the_default_collation(base, tmp_path):
    table = csv_file(tmp_path, f"url,day\n{base}{NAMES[0]},2020-01-02\n")
    with pytest.raises(ConfigError, match=r"a\.csv: row 0, column 'day': a value of type date cannot be collated"):
        next(iter(torchobj.DataLoader(torchobj.TableDataset(table, "url"), batch_size=1)))


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_prefix_in_place_of_a_table_is_named_with_its_objects(tmp_path, slash):
    (tmp_path / "tables").mkdir()
    for name in ("1.csv", "2.csv"):
        (tmp_path / "tables" / name).write_text("image\n")
    torchobj.Store("memory://table-prefix").put("tables/1.csv", b"image\n")
    for prefix, count in (
        (tmp_path / "tables", "2 objects"),
        ((tmp_path / "tables").as_uri(), "2 objects"),
        ("memory://table-prefix/tables", "1 object"),
    ):
        with pytest.raises((ObjectNotFoundError, InvalidKeyError)) as raised:
            torchobj.TableDataset(f"{prefix}{slash}", "image")
        [note] = raised.value.__notes__
        assert f"/tables/ has {count}: a table is one file" in note
    with pytest.raises(ObjectNotFoundError) as raised:
        torchobj.TableDataset(f"memory://table-prefix/nothing{slash}", "image")
    assert not hasattr(raised.value, "__notes__")
