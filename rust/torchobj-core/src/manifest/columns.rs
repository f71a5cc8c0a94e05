//! Exchanges the objects of a manifest with the columns of a table, in Arrow's layout. Does not know any table format.

use std::ops::Range;

use super::Manifest;
use super::packed::{Row, Rows};
use super::record::PackedVersion;
use crate::types::Version;

/// Objects as columns. Numbers are little-endian. A column of text consists of offsets, one more than there are
/// rows, and the bytes between them.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    /// Index of the base, as `i32`.
    pub bases: Vec<u8>,
    /// Offsets of the keys, as `i32`.
    pub key_offsets: Vec<u8>,
    /// The keys.
    pub keys: Vec<u8>,
    /// Sizes, as `i64`; -1: unknown.
    pub sizes: Vec<u8>,
    /// Offsets of the versions, as `i32`.
    pub version_offsets: Vec<u8>,
    /// The versions; empty: unknown.
    pub versions: Vec<u8>,
}

impl Manifest {
    /// The objects of `range` as columns. `None` if one does not exist, or if the texts exceed 2 GiB.
    pub fn columns(&self, range: Range<usize>) -> Option<Columns> {
        let mut columns = Columns::default();
        write_offset(&mut columns.key_offsets, 0)?;
        write_offset(&mut columns.version_offsets, 0)?;
        let mut rows = self.packed.rows(range.start);
        for _ in range {
            let (row, key) = rows.as_mut().and_then(Rows::next_with_key)?;
            columns.bases.extend_from_slice(&i32::try_from(row.base).ok()?.to_le_bytes());
            columns.keys.extend_from_slice(key);
            write_offset(&mut columns.key_offsets, columns.keys.len())?;
            let size = row.size.map_or(Some(-1), |size| i64::try_from(size).ok())?;
            columns.sizes.extend_from_slice(&size.to_le_bytes());
            if let Some(version) = row.version.unpack() {
                columns.versions.extend_from_slice(version.as_str().as_bytes());
            }
            write_offset(&mut columns.version_offsets, columns.versions.len())?;
        }
        Some(columns)
    }

    /// Appends the objects of `columns`. `None` if these are malformed; some objects may have been appended.
    pub fn extend(&mut self, bases: &[String], columns: &Columns) -> Option<()> {
        let known: Vec<u64> = bases.iter().map(|base| self.index_of(base)).collect();
        let rows = columns.bases.len() / 4;
        for row in 0..rows {
            let base = *known.get(usize::try_from(i32_at(&columns.bases, row)?).ok()?)?;
            let key = text_at(&columns.key_offsets, &columns.keys, row)?;
            let size = i64::from_le_bytes(columns.sizes.get(8 * row..8 * row + 8)?.try_into().ok()?);
            let size = if size == -1 { None } else { Some(u64::try_from(size).ok()?) };
            let version = text_at(&columns.version_offsets, &columns.versions, row)?;
            let version = Some(version).filter(|text| !text.is_empty()).map(Version::new);
            let version = PackedVersion::of(version.as_ref());
            self.push_row(key.as_bytes(), &Row { base, size, version });
        }
        Some(())
    }
}

fn write_offset(out: &mut Vec<u8>, offset: usize) -> Option<()> {
    out.extend_from_slice(&i32::try_from(offset).ok()?.to_le_bytes());
    Some(())
}

fn i32_at(bytes: &[u8], index: usize) -> Option<i32> {
    Some(i32::from_le_bytes(bytes.get(4 * index..4 * index + 4)?.try_into().ok()?))
}

fn text_at<'a>(offsets: &[u8], texts: &'a [u8], row: usize) -> Option<&'a str> {
    let start = usize::try_from(i32_at(offsets, row)?).ok()?;
    let end = usize::try_from(i32_at(offsets, row + 1)?).ok()?;
    std::str::from_utf8(texts.get(start..end)?).ok()
}
