//! Reads of arrays and slices of them, for distributed checkpoints.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::{Mutex, MutexGuard};
use torchobj_core::buffer::ReceivedBytes;
use torchobj_core::read::{BufferedRead, Frame, Outcome, Slice, SlicePlan, Tile, Wave};

use crate::buffer::{self, Buffer};
use crate::error::OrRaise;
use crate::store::{NativeStore, clients};
use crate::wait::wait_reporting;

/// Reads of arrays, and slices of them, that lie one behind the other in objects. Executed in waves.
///
/// Args:
///     store: The store of the objects.
///     prefix: Start of the keys of all objects.
///     verify: Compare the CRC-32 of arrays that are read whole.
///     wave_bytes: Size of the buffer that ends a wave.
///     tile_bytes: Maximum size of a tile, unless one element is larger.
#[pyclass(module = "torchobj._torchobj", frozen)]
pub(crate) struct NativeSlicePlan {
    plan: Arc<Mutex<SlicePlan>>,
    received: ReceivedBytes,
}

/// Shape of the rows, offsets in them, offsets in the slice, and shape of the tile.
type PyTile = (Vec<u64>, Vec<u64>, Vec<u64>, Vec<u64>);

/// What one wave of a `NativeSlicePlan` has read. Reads are given by their numbers.
///
/// Attributes:
///     buffer: The bytes of all arrays and tiles.
///     arrays: The reads of whole arrays.
///     starts: The offset of each of them in the buffer.
///     tiles: Read, offset in the buffer and tile of each part of a slice without memory of its own.
///     complete: The reads that ended with all bytes.
///     other_frame: The reads that found another frame.
///     damaged: The reads whose CRC-32 differs.
#[pyclass(module = "torchobj._torchobj", frozen, get_all)]
pub(crate) struct NativeWave {
    buffer: Py<Buffer>,
    // Lists of numbers, which the garbage collector does not track: there may be many small arrays.
    arrays: Vec<usize>,
    starts: Vec<usize>,
    tiles: Vec<(usize, usize, PyTile)>,
    complete: Vec<usize>,
    other_frame: Vec<usize>,
    damaged: Vec<usize>,
}

impl NativeWave {
    fn new(py: Python<'_>, wave: Wave) -> PyResult<Self> {
        let with = |outcome| {
            let ended = wave.ended.iter().filter(|(_, found)| *found == outcome);
            ended.map(|(number, _)| *number).collect()
        };
        let [complete, other_frame, damaged] = [Outcome::Complete, Outcome::OtherFrame, Outcome::Damaged].map(with);
        let (mut arrays, mut starts, mut tiles) = (Vec::new(), Vec::new(), Vec::new());
        for BufferedRead { read, start, tile } in wave.buffered {
            match tile {
                Some(Tile { shape, inner, outer, lengths }) => {
                    tiles.push((read, start, (shape, inner, outer, lengths)))
                }
                None => {
                    arrays.push(read);
                    starts.push(start);
                }
            }
        }
        let buffer = Py::new(py, Buffer::from(wave.buffer))?;
        Ok(Self { buffer, arrays, starts, tiles, complete, other_frame, damaged })
    }
}

impl NativeSlicePlan {
    fn plan(&self) -> PyResult<MutexGuard<'_, SlicePlan>> {
        self.plan.try_lock().map_err(|_| PyValueError::new_err("a wave of this plan is being read"))
    }
}

fn frame(plan: &mut SlicePlan, before: Option<&[u8]>, crc32: u32) -> Frame {
    before.map_or(Frame::None(crc32), |before| plan.described(before))
}

#[pymethods]
impl NativeSlicePlan {
    #[new]
    fn new(
        py: Python<'_>,
        store: &Bound<'_, NativeStore>,
        prefix: String,
        verify: bool,
        wave_bytes: u64,
        tile_bytes: u64,
    ) -> PyResult<Self> {
        let client = clients(py, std::iter::once(store))?.remove(0);
        let plan = SlicePlan::new(client, prefix, verify, wave_bytes, tile_bytes);
        let received = plan.received();
        Ok(Self { plan: Arc::new(Mutex::new(plan)), received })
    }

    /// Adds a whole array of `array_bytes` bytes, which is read into the buffer. `before` are the bytes that precede it
    /// from `offset` on; a descriptor follows it then. Without them the array starts at `offset`. Returns the number of
    /// the read.
    fn add_array(&self, name: &str, offset: u64, before: Option<&[u8]>, array_bytes: u64) -> PyResult<usize> {
        let mut plan = self.plan()?;
        let frame = frame(&mut plan, before, 0);
        Ok(plan.add_array(name, offset, frame, array_bytes))
    }

    /// Adds a slice of an array with elements of `width` bytes. `memory` is a writable buffer of its size, which
    /// receives it if no other read does and its runs are long. Otherwise it is read tile by tile. Without `before`,
    /// `crc32` is that of the array; 0 if it is unknown. Returns the number of the read.
    #[expect(clippy::too_many_arguments, reason = "each is one property of the slice")]
    fn add_slice(
        &self,
        name: &str,
        offset: u64,
        before: Option<&[u8]>,
        crc32: u32,
        shape: Vec<u64>,
        offsets: Vec<u64>,
        lengths: Vec<u64>,
        width: u64,
        memory: Option<Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let slice = Slice::new(shape, offsets, lengths, width);
        let slice = slice.ok_or_else(|| PyValueError::new_err("not a slice of an array"))?;
        let memory = memory.as_ref().map(buffer::borrow).transpose()?;
        let mut plan = self.plan()?;
        let frame = frame(&mut plan, before, crc32);
        Ok(plan.add_slice(name, offset, frame, &slice, memory))
    }

    /// Executes the next wave. Returns `None` if no read is left.
    ///
    /// Args:
    ///     progress: Called about every 0.1 s with the number of bytes of all waves that have arrived; its exception
    ///         ends the reads.
    #[pyo3(signature = (progress=None))]
    fn read(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<Option<NativeWave>> {
        let plan = self.plan.clone();
        let report = |_: Python<'_>| progress.map_or(Ok(()), |call| call.call1((self.received.bytes(),)).map(drop));
        let wave = wait_reporting(py, async move { plan.lock().await.read().await }, report)?.or_raise(py)?;
        wave.map(|wave| NativeWave::new(py, wave)).transpose()
    }
}
