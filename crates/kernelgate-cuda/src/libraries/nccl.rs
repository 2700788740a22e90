//! Collective operations through NCCL, with one communicator for each GPU of the set, all in this
//! process.
//!
//! The first exchange of each kind connects the GPUs, and the host waits for all GPUs during it. A
//! watchdog aborts NCCL's wait if it takes too long. This module supports neither several processes
//! nor registered memory.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::driver::CudaStream;
use crate::library::{self, RequiredLibrary};
use crate::{BackendError, Devices};

/// Oldest NCCL version that this crate uses.
const OLDEST_NCCL: c_int = 21_800;
const NCCL_SUM: c_int = 0;

/// An opaque communicator.
type RawCommunicator = *mut c_void;

/// Type of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NcclElement {
    /// 32-bit floats.
    F32,
    /// 16-bit floats with the exponent range of f32 (bfloat16).
    Bf16,
}

impl NcclElement {
    const fn nccl_type_number(self) -> c_int {
        match self {
            Self::F32 => 7,
            Self::Bf16 => 9,
        }
    }
}

/// Address of the data that a GPU sends, and of the data that it receives.
#[derive(Debug, Clone, Copy)]
pub struct SendReceiveAddresses {
    /// Read.
    pub send: u64,
    /// Written.
    pub receive: u64,
}

/// An exchange between the GPUs of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NcclCollective {
    /// Everyone gets the sum.
    AllReduce,
    /// Every GPU gets the parts of all GPUs.
    AllGather,
    /// Every GPU receives its part of the sum over all GPUs.
    ReduceScatter,
    /// Every GPU gets the data of the first GPU.
    Broadcast,
    /// The last GPU gets the data of the first GPU.
    Send,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NcclUniqueId {
    bytes: [c_char; 128],
}

/// The fifth parameter is the operator, of a broadcast the rank that sends.
type ReduceFunction =
    unsafe extern "C" fn(u64, u64, usize, c_int, c_int, RawCommunicator, *mut c_void) -> c_int;

type EndCommunicator = unsafe extern "C" fn(RawCommunicator) -> c_int;

struct NcclApi {
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut NcclUniqueId) -> c_int,
    connect: unsafe extern "C" fn(*mut RawCommunicator, c_int, NcclUniqueId, c_int) -> c_int,
    abort: EndCommunicator,
    destroy: EndCommunicator,
    begin: unsafe extern "C" fn() -> c_int,
    end: unsafe extern "C" fn() -> c_int,
    all_reduce: ReduceFunction,
    reduce_scatter: ReduceFunction,
    all_gather: unsafe extern "C" fn(u64, u64, usize, c_int, RawCommunicator, *mut c_void) -> c_int,
    broadcast: ReduceFunction,
    send: PointToPointFunction,
    receive: PointToPointFunction,
}

type PointToPointFunction =
    unsafe extern "C" fn(u64, usize, c_int, c_int, RawCommunicator, *mut c_void) -> c_int;

/// Whether NCCL is here, in a version that is used.
///
/// # Errors
/// Fails with [`BackendError::Unsupported`] and the reason, with which cases that need NCCL are
/// skipped.
pub fn check_nccl() -> Result<(), BackendError> {
    nccl_api().map(drop)
}

fn nccl_api() -> Result<&'static NcclApi, BackendError> {
    static API: OnceLock<Result<NcclApi, String>> = OnceLock::new();
    API.get_or_init(load_nccl).as_ref().map_err(|why| BackendError::Unsupported(why.clone()))
}

fn load_nccl() -> Result<NcclApi, String> {
    let library = RequiredLibrary::Nccl;
    library::load_once(library)
        .ok_or_else(|| format!("needs {}: {}", library.name(), library.install_advice()))?;
    // SAFETY: the function types are those of NCCL 2's header, where enumerations are ints.
    unsafe {
        let version: unsafe extern "C" fn(*mut c_int) -> c_int = nccl_function(c"ncclGetVersion")?;
        let mut number = 0;
        let status = version(&raw mut number);
        check_nccl_version(status, number)?;
        Ok(NcclApi {
            error: nccl_function(c"ncclGetErrorString")?,
            unique_id: nccl_function(c"ncclGetUniqueId")?,
            connect: nccl_function(c"ncclCommInitRank")?,
            abort: nccl_function(c"ncclCommAbort")?,
            destroy: nccl_function(c"ncclCommDestroy")?,
            begin: nccl_function(c"ncclGroupStart")?,
            end: nccl_function(c"ncclGroupEnd")?,
            all_reduce: nccl_function(c"ncclAllReduce")?,
            reduce_scatter: nccl_function(c"ncclReduceScatter")?,
            all_gather: nccl_function(c"ncclAllGather")?,
            broadcast: nccl_function(c"ncclBroadcast")?,
            send: nccl_function(c"ncclSend")?,
            receive: nccl_function(c"ncclRecv")?,
        })
    }
}

/// Checks that this crate supports the NCCL version that the library reports.
fn check_nccl_version(status: c_int, number: c_int) -> Result<(), String> {
    if status == 0 && number >= OLDEST_NCCL {
        return Ok(());
    }
    let show = |number: c_int| format!("{}.{}", number / 10_000, number / 100 % 100);
    Err(format!("needs NCCL {} or later, here is {}", show(OLDEST_NCCL), show(number)))
}

/// Looks up a function of the NCCL library.
///
/// # Safety
/// The caller chooses `F` as the type of the function with that name.
unsafe fn nccl_function<F: Copy>(name: &CStr) -> Result<F, String> {
    // SAFETY: the caller's promise.
    unsafe { library::typed_function(RequiredLibrary::Nccl, name) }
        .ok_or_else(|| format!("this NCCL has no {}", name.to_string_lossy()))
}

impl NcclApi {
    fn check(&self, status: c_int, action: &str) -> Result<(), BackendError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: For every status, NCCL returns a static text.
        let text = unsafe { CStr::from_ptr((self.error)(status)) }.to_string_lossy();
        Err(BackendError::Launch(format!("NCCL failed to {action}: {text}")))
    }
}

/// An NCCL communicator that was created on another thread.
#[derive(Clone, Copy)]
struct CommunicatorHandle(RawCommunicator);

// SAFETY: NCCL allows different threads to use a communicator one after another, and another thread
// to abort it.
unsafe impl Send for CommunicatorHandle {}

/// A thread that aborts the first communicator if an NCCL call does not return in time. After an
/// abort, NCCL ends the calls of the other communicators in the group, and frees memory only when
/// the last communicator is aborted.
struct NcclWatchdog {
    /// Channel that gets a message when an NCCL call begins, and one when the call has returned.
    calls: Option<mpsc::Sender<()>>,
    aborted: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl NcclWatchdog {
    fn new(abort: EndCommunicator, first: CommunicatorHandle, timeout: Duration) -> Self {
        let (calls, received) = mpsc::channel();
        let aborted = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let aborted = Arc::clone(&aborted);
            move || {
                // The thread must capture the whole communicator value, which can be sent; its raw
                // pointer cannot be sent.
                let communicator: CommunicatorHandle = first;
                while received.recv().is_ok() {
                    if received.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout) {
                        aborted.store(true, Ordering::SeqCst);
                        // SAFETY: alive until all communicators of the set are aborted.
                        let _ = unsafe { abort(communicator.0) };
                        return;
                    }
                }
            }
        });
        Self { calls: Some(calls), aborted, thread: Some(thread) }
    }

    fn watch_call<T>(&self, call: impl FnOnce() -> T) -> T {
        // After an abort nobody receives messages, so that errors are ignored.
        let send_message = || self.calls.as_ref().map(|calls| calls.send(()));
        send_message();
        let returned = call();
        send_message();
        returned
    }

    fn has_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Ends the thread. Returns whether the watchdog has aborted the first communicator.
    fn end_watchdog(&mut self) -> bool {
        drop(self.calls.take());
        let _ = self.thread.take().map(JoinHandle::join);
        self.has_aborted()
    }
}

/// The communicators of a set of GPUs, one for each.
pub struct NcclCommunicators {
    api: &'static NcclApi,
    raw: Vec<CommunicatorHandle>,
    watchdog: NcclWatchdog,
    streams: Vec<Arc<CudaStream>>,
    devices: Devices,
}

impl NcclCommunicators {
    /// Connects the GPUs of a set, each by a thread of its own.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if NCCL is missing or too old;
    /// [`BackendError::Lost`] if a GPU does not connect within the timeout of its device, with its
    /// rank, or if NCCL fails.
    pub fn connect_gpus(devices: &Devices) -> Result<NcclCommunicators, BackendError> {
        let api = nccl_api()?;
        disable_multicast();
        let mut id = NcclUniqueId { bytes: [0; 128] };
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        api.check(unsafe { (api.unique_id)(&raw mut id) }, "make an identity")?;
        let count = devices.device_count();
        let (done, results) = mpsc::channel();
        for (rank, device) in devices.iter().enumerate() {
            let (device, done) = (Arc::clone(device), done.clone());
            std::thread::spawn(move || {
                let connected = device.make_current().and_then(|()| {
                    let mut raw = std::ptr::null_mut();
                    // SAFETY: the pointer is valid, and the GPU's context is current.
                    let status =
                        unsafe { (api.connect)(&raw mut raw, count as c_int, id, rank as c_int) };
                    api.check(status, &format!("connect rank {rank}"))?;
                    Ok(CommunicatorHandle(raw))
                });
                // After a timeout nobody receives this result.
                let _ = done.send((rank, connected));
            });
        }
        drop(done);
        let mut raw: Vec<Option<CommunicatorHandle>> = (0..count).map(|_| None).collect();
        let timeout = devices.first_device().options().timeout;
        let begun = Instant::now();
        while raw.iter().any(Option::is_none) {
            match results.recv_timeout(timeout.saturating_sub(begun.elapsed())) {
                Ok((rank, connected)) => raw[rank] = Some(connected?),
                Err(_) => {
                    let missing: Vec<String> = (0..count)
                        .filter(|&rank| raw[rank].is_none())
                        .map(|rank| rank.to_string())
                        .collect();
                    let why = format!(
                        "NCCL did not connect rank {} of {count} within {} s",
                        missing.join(", "),
                        timeout.as_secs()
                    );
                    return Err(BackendError::Lost(why));
                }
            }
        }
        devices.first_device().make_current()?;
        let streams = devices.iter().map(|device| Arc::clone(device.stream())).collect();
        let raw: Vec<CommunicatorHandle> = raw.into_iter().flatten().collect();
        let watchdog = NcclWatchdog::new(api.abort, raw[0], timeout);
        Ok(Self { api, raw, watchdog, streams, devices: devices.clone() })
    }

    /// Enqueues a collective on the streams of all GPUs. `parts` has the memory of each; `count` is
    /// the number of elements that each sends (of a reduce-scatter: receives).
    ///
    /// # Errors
    /// Fails if NCCL refuses; [`BackendError::Lost`] with the ranks that wait if others have not
    /// begun within the timeout of the device.
    pub fn enqueue_collective(
        &self,
        collective: NcclCollective,
        element: NcclElement,
        count: usize,
        parts: &[SendReceiveAddresses],
    ) -> Result<(), BackendError> {
        if self.watchdog.has_aborted() {
            return Err(self.aborted_call_error(parts.len()));
        }
        let api = self.api;
        // SAFETY: a group is begun and ended on this thread.
        api.check(unsafe { (api.begin)() }, "begin a group")?;
        let mut called = Ok(());
        for (rank, part) in parts.iter().enumerate().take(self.raw.len()) {
            called = called.and(self.enqueue_on_rank(rank, collective, element, count, *part));
        }
        // SAFETY: as above.
        let ended = self.watchdog.watch_call(|| unsafe { (api.end)() });
        if self.watchdog.has_aborted() {
            let _ = self.devices.first_device().make_current();
            return Err(self.aborted_call_error(parts.len()));
        }
        called
            .and(api.check(ended, "end a group"))
            .and_then(|()| self.devices.first_device().make_current())
    }

    /// The error after an abort of a call for the first `begun` ranks.
    fn aborted_call_error(&self, begun: usize) -> BackendError {
        let gpus = self.devices.iter().enumerate().take(begun);
        let gpus: Vec<String> = gpus
            .map(|(rank, device)| format!("rank {rank} on GPU {}", device.facts().ordinal))
            .collect();
        let seconds = self.devices.first_device().options().timeout.as_secs();
        let (gpus, all) = (gpus.join(", "), self.raw.len());
        BackendError::Lost(format!(
            "NCCL waits for more than {seconds} s to connect {gpus} of {all}: one has not begun"
        ))
    }

    /// Enqueues the call of one GPU inside an NCCL group.
    fn enqueue_on_rank(
        &self,
        rank: usize,
        collective: NcclCollective,
        element: NcclElement,
        count: usize,
        SendReceiveAddresses { send, receive }: SendReceiveAddresses,
    ) -> Result<(), BackendError> {
        let (api, comm) = (self.api, self.raw[rank].0);
        let (stream, dtype) = (self.streams[rank].cu_stream().cast(), element.nccl_type_number());
        let last = self.raw.len() - 1;
        // SAFETY: communicator and stream live; what lies behind the addresses is accessed on the
        // GPUs only.
        let status = unsafe {
            match collective {
                NcclCollective::AllReduce => {
                    (api.all_reduce)(send, receive, count, dtype, NCCL_SUM, comm, stream)
                }
                NcclCollective::AllGather => {
                    (api.all_gather)(send, receive, count, dtype, comm, stream)
                }
                NcclCollective::ReduceScatter => {
                    (api.reduce_scatter)(send, receive, count, dtype, NCCL_SUM, comm, stream)
                }
                NcclCollective::Broadcast => {
                    (api.broadcast)(send, receive, count, dtype, 0, comm, stream)
                }
                NcclCollective::Send if rank == 0 => {
                    (api.send)(send, count, dtype, last as c_int, comm, stream)
                }
                NcclCollective::Send if rank == last => {
                    (api.receive)(receive, count, dtype, 0, comm, stream)
                }
                NcclCollective::Send => 0,
            }
        };
        api.check(status, &format!("enqueue rank {rank}"))
    }
}

impl Drop for NcclCommunicators {
    fn drop(&mut self) {
        let aborted = self.watchdog.end_watchdog();
        let idle = !aborted && self.devices.iter().all(|device| device.is_busy() == Ok(false));
        let end = if idle { self.api.destroy } else { self.api.abort };
        let left = self.raw.split_off(usize::from(aborted));
        let (done, ended) = mpsc::channel();
        // Aborts run on another thread, because NCCL waits without a time limit for its kernels and
        // for graphs that were captured with it. If the abort does not end in time, the
        // communicator's memory is not freed.
        std::thread::spawn(move || {
            for communicator in left {
                // SAFETY: the communicator was made by ncclCommInitRank and is ended once. If a GPU
                // still works, or has failed, NCCL would wait for it, so the communicators are
                // aborted instead.
                let _ = unsafe { end(communicator.0) };
            }
            let _ = done.send(());
        });
        let _ = ended.recv_timeout(self.devices.first_device().options().timeout);
        let _ = self.devices.first_device().make_current();
    }
}

/// Keeps NCCL from NVLink multicast, which not every machine offers to every process. Multicast is
/// not changed if the user has set NCCL's variable.
#[expect(clippy::disallowed_methods, reason = "a variable of NCCL")]
fn disable_multicast() {
    const MULTICAST_VARIABLE: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(MULTICAST_VARIABLE).is_none() {
        // SAFETY: NCCL reads its variables in its first call, which follows; no other thread of
        // this process changes variables.
        unsafe { std::env::set_var(MULTICAST_VARIABLE, "0") };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outdated_nccl_is_refused_with_both_versions() {
        assert_eq!(check_nccl_version(0, 22_809), Ok(()));
        let old = Err("needs NCCL 2.18 or later, here is 2.10".to_owned());
        assert_eq!(check_nccl_version(0, 21_003), old);
        assert!(check_nccl_version(3, 22_809).is_err());
    }

    unsafe extern "C" fn record_abort(raw: RawCommunicator) -> c_int {
        // SAFETY: the test's own flag, which lives for ever.
        unsafe { &*raw.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
        0
    }

    #[test]
    fn an_nccl_call_that_does_not_return_is_aborted_once() {
        let waits = |milliseconds: u64| {
            let flag: &'static AtomicBool = Box::leak(Box::default());
            let first = CommunicatorHandle(std::ptr::from_ref(flag).cast_mut().cast());
            let mut watchdog = NcclWatchdog::new(record_abort, first, Duration::from_millis(100));
            for _ in 0..2 {
                watchdog.watch_call(|| std::thread::sleep(Duration::from_millis(milliseconds)));
            }
            assert_eq!(watchdog.end_watchdog(), flag.load(Ordering::SeqCst));
            watchdog.has_aborted()
        };
        assert!(!waits(1));
        assert!(waits(300));
    }
}
