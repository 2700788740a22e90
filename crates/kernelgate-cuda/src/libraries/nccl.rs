//! Collective operations of several GPUs through NCCL; one process holds one communicator for each
//! GPU.
//!
//! NCCL connects the GPUs in the first exchange of each kind, and blocks the host until all GPUs
//! are connected. A watchdog thread aborts an NCCL call that does not return within the device's
//! timeout. This module supports neither several processes nor memory that is registered with NCCL.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::driver::CudaStream;
use crate::library::{self, NvidiaLibrary};
use crate::{BackendError, Devices};

/// Oldest NCCL version that this crate uses: 2.18, as NCCL encodes it.
const OLDEST_SUPPORTED_NCCL_VERSION: c_int = 21_800;
const NCCL_SUM_OPERATOR: c_int = 0;

/// An opaque communicator.
type RawNcclCommunicator = *mut c_void;

/// Element type of the buffers of an NCCL collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NcclElementType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats with the exponent range of f32 (bfloat16).
    Bf16,
}

impl NcclElementType {
    const fn nccl_type_number(self) -> c_int {
        match self {
            Self::F32 => 7,
            Self::Bf16 => 9,
        }
    }
}

/// Device address of the data that one GPU sends in a collective, and of the data that it receives.
#[derive(Debug, Clone, Copy)]
pub struct CollectiveBufferAddresses {
    /// Read.
    pub send_address: u64,
    /// Written.
    pub receive_address: u64,
}

/// A collective operation between the GPUs of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NcclCollective {
    /// Every GPU gets the sum of the data of all GPUs.
    AllReduce,
    /// Every GPU gets the data of all GPUs, one behind another.
    AllGather,
    /// Every GPU receives its own part of the sum over all GPUs.
    ReduceScatter,
    /// Every GPU gets the data of the GPU of rank 0.
    Broadcast,
    /// The GPU of the last rank receives the data of the GPU of rank 0; GPUs between do nothing.
    SendToLastRank,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NcclUniqueId {
    bytes: [c_char; 128],
}

/// Signature of `ncclAllReduce`, `ncclReduceScatter` and `ncclBroadcast`; the fifth parameter is
/// the operator, for a broadcast the sending rank.
type ReduceOrBroadcastFunction =
    unsafe extern "C" fn(u64, u64, usize, c_int, c_int, RawNcclCommunicator, *mut c_void) -> c_int;

type DestroyCommunicatorFunction = unsafe extern "C" fn(RawNcclCommunicator) -> c_int;

struct NcclFunctions {
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_unique_id: unsafe extern "C" fn(*mut NcclUniqueId) -> c_int,
    init_all_communicators:
        unsafe extern "C" fn(*mut RawNcclCommunicator, c_int, NcclUniqueId, c_int) -> c_int,
    abort: DestroyCommunicatorFunction,
    destroy: DestroyCommunicatorFunction,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    all_reduce: ReduceOrBroadcastFunction,
    reduce_scatter: ReduceOrBroadcastFunction,
    all_gather:
        unsafe extern "C" fn(u64, u64, usize, c_int, RawNcclCommunicator, *mut c_void) -> c_int,
    broadcast: ReduceOrBroadcastFunction,
    send: SendOrReceiveFunction,
    receive: SendOrReceiveFunction,
}

type SendOrReceiveFunction =
    unsafe extern "C" fn(u64, usize, c_int, c_int, RawNcclCommunicator, *mut c_void) -> c_int;

/// Checks that the NCCL library can be opened and that its version is at least 2.18.
///
/// # Errors
/// Fails with [`BackendError::Unsupported`] and the reason, with which cases that need NCCL are
/// skipped.
pub fn check_nccl_is_available() -> Result<(), BackendError> {
    nccl_functions().map(drop)
}

fn nccl_functions() -> Result<&'static NcclFunctions, BackendError> {
    static API: OnceLock<Result<NcclFunctions, String>> = OnceLock::new();
    API.get_or_init(load_nccl_functions)
        .as_ref()
        .map_err(|why| BackendError::Unsupported(why.clone()))
}

fn load_nccl_functions() -> Result<NcclFunctions, String> {
    let library = NvidiaLibrary::Nccl;
    library::open_library_once(library).ok_or_else(|| {
        format!(
            "needs {}: {}",
            library.library_name_in_messages(),
            library.advice_to_install_library()
        )
    })?;
    // SAFETY: the function types are those of NCCL 2's header, whose enumerations have the size of
    // an int.
    unsafe {
        let version: unsafe extern "C" fn(*mut c_int) -> c_int =
            typed_nccl_function(c"ncclGetVersion")?;
        let mut number = 0;
        let status = version(&raw mut number);
        check_nccl_version_is_supported(status, number)?;
        Ok(NcclFunctions {
            get_error_string: typed_nccl_function(c"ncclGetErrorString")?,
            get_unique_id: typed_nccl_function(c"ncclGetUniqueId")?,
            init_all_communicators: typed_nccl_function(c"ncclCommInitRank")?,
            abort: typed_nccl_function(c"ncclCommAbort")?,
            destroy: typed_nccl_function(c"ncclCommDestroy")?,
            group_start: typed_nccl_function(c"ncclGroupStart")?,
            group_end: typed_nccl_function(c"ncclGroupEnd")?,
            all_reduce: typed_nccl_function(c"ncclAllReduce")?,
            reduce_scatter: typed_nccl_function(c"ncclReduceScatter")?,
            all_gather: typed_nccl_function(c"ncclAllGather")?,
            broadcast: typed_nccl_function(c"ncclBroadcast")?,
            send: typed_nccl_function(c"ncclSend")?,
            receive: typed_nccl_function(c"ncclRecv")?,
        })
    }
}

/// Checks that the NCCL version which the library reports is at least 2.18.
fn check_nccl_version_is_supported(status: c_int, number: c_int) -> Result<(), String> {
    if status == 0 && number >= OLDEST_SUPPORTED_NCCL_VERSION {
        return Ok(());
    }
    let show = |number: c_int| format!("{}.{}", number / 10_000, number / 100 % 100);
    Err(format!(
        "needs NCCL {} or later, here is {}",
        show(OLDEST_SUPPORTED_NCCL_VERSION),
        show(number)
    ))
}

/// Looks up a function of the NCCL library by name.
///
/// # Safety
/// The caller chooses `F` as the type of the function with that name.
unsafe fn typed_nccl_function<F: Copy>(name: &CStr) -> Result<F, String> {
    // SAFETY: the caller guarantees that `F` is the type of the NCCL function with this name.
    unsafe { library::typed_library_function(NvidiaLibrary::Nccl, name) }
        .ok_or_else(|| format!("this NCCL has no {}", name.to_string_lossy()))
}

impl NcclFunctions {
    fn check_nccl_status(&self, status: c_int, action: &str) -> Result<(), BackendError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a static text for every status.
        let text = unsafe { CStr::from_ptr((self.get_error_string)(status)) }.to_string_lossy();
        Err(BackendError::ComputationFailed(format!("NCCL failed to {action}: {text}")))
    }
}

/// Pointer to an NCCL communicator, which may be sent to another thread.
#[derive(Clone, Copy)]
struct SendableCommunicator(RawNcclCommunicator);

// SAFETY: NCCL allows different threads to use a communicator one after another, and another thread
// to abort a communicator in use.
unsafe impl Send for SendableCommunicator {}

/// A thread that aborts the first communicator of the set if an NCCL call does not return within
/// the timeout. After the first communicator is aborted, NCCL ends the calls of the other
/// communicators, and frees memory when the last is aborted.
struct NcclCallWatchdog {
    /// Channel to the watchdog thread, which gets a message when an NCCL call begins and another
    /// when the call has returned.
    call_events_to_watchdog: Option<mpsc::Sender<()>>,
    communicator_aborted: Arc<AtomicBool>,
    watchdog_thread: Option<JoinHandle<()>>,
}

impl NcclCallWatchdog {
    fn spawn_nccl_watchdog(
        abort: DestroyCommunicatorFunction,
        first: SendableCommunicator,
        timeout: Duration,
    ) -> Self {
        let (calls, received) = mpsc::channel();
        let aborted = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let aborted = Arc::clone(&aborted);
            move || {
                // The thread must capture the whole `SendableCommunicator`, which is `Send`, and
                // not only its raw pointer, which is not `Send`.
                let communicator: SendableCommunicator = first;
                while received.recv().is_ok() {
                    if received.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout) {
                        aborted.store(true, Ordering::SeqCst);
                        // SAFETY: the communicator is alive until all communicators of the set are
                        // aborted.
                        let _ = unsafe { abort(communicator.0) };
                        return;
                    }
                }
            }
        });
        Self {
            call_events_to_watchdog: Some(calls),
            communicator_aborted: aborted,
            watchdog_thread: Some(thread),
        }
    }

    fn run_nccl_call_under_watchdog<T>(&self, call: impl FnOnce() -> T) -> T {
        // After an abort the watchdog thread receives no messages, so errors of `send` are ignored.
        let send_message = || self.call_events_to_watchdog.as_ref().map(|calls| calls.send(()));
        send_message();
        let returned = call();
        send_message();
        returned
    }

    fn has_aborted_communicator(&self) -> bool {
        self.communicator_aborted.load(Ordering::SeqCst)
    }

    /// Ends the thread. Ends the watchdog thread and returns whether it has aborted the first
    /// communicator.
    fn end_watchdog_thread(&mut self) -> bool {
        drop(self.call_events_to_watchdog.take());
        let _ = self.watchdog_thread.take().map(JoinHandle::join);
        self.has_aborted_communicator()
    }
}

/// NCCL communicators of a set of GPUs, one for each GPU.
pub struct NcclCommunicatorsOfGpus {
    api: &'static NcclFunctions,
    raw_communicators: Vec<SendableCommunicator>,
    watchdog: NcclCallWatchdog,
    streams: Vec<Arc<CudaStream>>,
    devices: Devices,
}

impl NcclCommunicatorsOfGpus {
    /// Creates one communicator for each GPU of a set, each on a thread of its own because
    /// `ncclCommInitRank` waits for all ranks.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if NCCL is missing or too old;
    /// [`BackendError::DeviceLost`] if a GPU does not connect within the timeout of its device,
    /// with its rank, or if NCCL fails.
    pub fn connect_gpus_by_nccl(
        devices: &Devices,
    ) -> Result<NcclCommunicatorsOfGpus, BackendError> {
        let api = nccl_functions()?;
        disable_nccl_nvlink_multicast();
        let mut id = NcclUniqueId { bytes: [0; 128] };
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        api.check_nccl_status(unsafe { (api.get_unique_id)(&raw mut id) }, "make an identity")?;
        let count = devices.device_count();
        let (done, results) = mpsc::channel();
        for (rank, device) in devices.iter().enumerate() {
            let (device, done) = (Arc::clone(device), done.clone());
            std::thread::spawn(move || {
                let connected = device.make_context_current().and_then(|()| {
                    let mut raw = std::ptr::null_mut();
                    // SAFETY: the pointer to the new communicator is valid, and the GPU's context
                    // is current on this thread.
                    let status = unsafe {
                        (api.init_all_communicators)(
                            &raw mut raw,
                            count as c_int,
                            id,
                            rank as c_int,
                        )
                    };
                    api.check_nccl_status(status, &format!("connect rank {rank}"))?;
                    Ok(SendableCommunicator(raw))
                });
                // After a timeout no thread receives the new communicator, so an error of `send` is
                // ignored.
                let _ = done.send((rank, connected));
            });
        }
        drop(done);
        let mut raw: Vec<Option<SendableCommunicator>> = (0..count).map(|_| None).collect();
        let timeout = devices.first_device().options().hung_kernel_timeout;
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
                    return Err(BackendError::DeviceLost(why));
                }
            }
        }
        devices.first_device().make_context_current()?;
        let streams = devices.iter().map(|device| Arc::clone(device.stream())).collect();
        let raw: Vec<SendableCommunicator> = raw.into_iter().flatten().collect();
        let watchdog = NcclCallWatchdog::spawn_nccl_watchdog(api.abort, raw[0], timeout);
        Ok(Self { api, raw_communicators: raw, watchdog, streams, devices: devices.clone() })
    }

    /// Enqueues an NCCL collective on the streams of all GPUs of the set. `parts` holds each GPU's
    /// addresses; `count` is the number of elements that each GPU sends (for a reduce-scatter:
    /// receives).
    ///
    /// # Errors
    /// Fails if NCCL refuses; [`BackendError::DeviceLost`] with the ranks that wait if others have
    /// not begun within the timeout of the device.
    pub fn enqueue_collective_on_all_gpus(
        &self,
        collective: NcclCollective,
        element: NcclElementType,
        count: usize,
        parts: &[CollectiveBufferAddresses],
    ) -> Result<(), BackendError> {
        if self.watchdog.has_aborted_communicator() {
            return Err(self.error_after_watchdog_abort(parts.len()));
        }
        let api = self.api;
        // SAFETY: the NCCL group is begun and ended on this thread.
        api.check_nccl_status(unsafe { (api.group_start)() }, "begin a group")?;
        let mut called = Ok(());
        for (rank, part) in parts.iter().enumerate().take(self.raw_communicators.len()) {
            called = called
                .and(self.enqueue_collective_on_rank(rank, collective, element, count, *part));
        }
        // SAFETY: as above.
        let ended = self.watchdog.run_nccl_call_under_watchdog(|| unsafe { (api.group_end)() });
        if self.watchdog.has_aborted_communicator() {
            let _ = self.devices.first_device().make_context_current();
            return Err(self.error_after_watchdog_abort(parts.len()));
        }
        called
            .and(api.check_nccl_status(ended, "end a group"))
            .and_then(|()| self.devices.first_device().make_context_current())
    }

    /// Returns the error for an NCCL call that the watchdog aborted; `begun` ranks, from rank 0,
    /// had begun the call.
    fn error_after_watchdog_abort(&self, begun: usize) -> BackendError {
        let gpus = self.devices.iter().enumerate().take(begun);
        let gpus: Vec<String> = gpus
            .map(|(rank, device)| {
                format!("rank {rank} on GPU {}", device.gpu_properties().gpu_ordinal)
            })
            .collect();
        let seconds = self.devices.first_device().options().hung_kernel_timeout.as_secs();
        let (gpus, all) = (gpus.join(", "), self.raw_communicators.len());
        BackendError::DeviceLost(format!(
            "NCCL waits for more than {seconds} s to connect {gpus} of {all}: one has not begun"
        ))
    }

    /// Enqueues one GPU's part of a collective, inside an NCCL group.
    fn enqueue_collective_on_rank(
        &self,
        rank: usize,
        collective: NcclCollective,
        element: NcclElementType,
        count: usize,
        CollectiveBufferAddresses { send_address: send, receive_address: receive }: CollectiveBufferAddresses,
    ) -> Result<(), BackendError> {
        let (api, comm) = (self.api, self.raw_communicators[rank].0);
        let (stream, dtype) = (self.streams[rank].cu_stream().cast(), element.nccl_type_number());
        let last = self.raw_communicators.len() - 1;
        // SAFETY: the communicator and the stream are alive; only GPUs access the memory at the
        // addresses.
        let status = unsafe {
            match collective {
                NcclCollective::AllReduce => {
                    (api.all_reduce)(send, receive, count, dtype, NCCL_SUM_OPERATOR, comm, stream)
                }
                NcclCollective::AllGather => {
                    (api.all_gather)(send, receive, count, dtype, comm, stream)
                }
                NcclCollective::ReduceScatter => (api.reduce_scatter)(
                    send,
                    receive,
                    count,
                    dtype,
                    NCCL_SUM_OPERATOR,
                    comm,
                    stream,
                ),
                NcclCollective::Broadcast => {
                    (api.broadcast)(send, receive, count, dtype, 0, comm, stream)
                }
                NcclCollective::SendToLastRank if rank == 0 => {
                    (api.send)(send, count, dtype, last as c_int, comm, stream)
                }
                NcclCollective::SendToLastRank if rank == last => {
                    (api.receive)(receive, count, dtype, 0, comm, stream)
                }
                NcclCollective::SendToLastRank => 0,
            }
        };
        api.check_nccl_status(status, &format!("enqueue rank {rank}"))
    }
}

impl Drop for NcclCommunicatorsOfGpus {
    fn drop(&mut self) {
        let aborted = self.watchdog.end_watchdog_thread();
        let idle =
            !aborted && self.devices.iter().all(|device| device.is_stream_busy() == Ok(false));
        let end = if idle { self.api.destroy } else { self.api.abort };
        let left = self.raw_communicators.split_off(usize::from(aborted));
        let (done, ended) = mpsc::channel();
        // Another thread ends the communicators, because NCCL waits without a time limit for its
        // kernels and for graphs that captured it. If NCCL does not end a communicator within the
        // device's timeout, the communicator's memory is not freed.
        std::thread::spawn(move || {
            for communicator in left {
                // SAFETY: `ncclCommInitRank` made the communicator, and it is destroyed or aborted
                // once. If a GPU is busy or has failed, `ncclCommDestroy` would wait for it, so the
                // communicators are aborted instead.
                let _ = unsafe { end(communicator.0) };
            }
            let _ = done.send(());
        });
        let _ = ended.recv_timeout(self.devices.first_device().options().hung_kernel_timeout);
        let _ = self.devices.first_device().make_context_current();
    }
}

/// Disables NVLink multicast in NCCL, because some machines do not offer multicast to every
/// process. An `NCCL_NVLS_ENABLE` that the user has set is left as it is.
#[expect(clippy::disallowed_methods, reason = "a variable of NCCL")]
fn disable_nccl_nvlink_multicast() {
    const NCCL_MULTICAST_VARIABLE: &str = "NCCL_NVLS_ENABLE";
    if std::env::var_os(NCCL_MULTICAST_VARIABLE).is_none() {
        // SAFETY: NCCL reads its environment variables in its first call, which follows; no other
        // thread of this process changes environment variables.
        unsafe { std::env::set_var(NCCL_MULTICAST_VARIABLE, "0") };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outdated_nccl_version_is_refused() {
        assert_eq!(check_nccl_version_is_supported(0, 22_809), Ok(()));
        let old = Err("needs NCCL 2.18 or later, here is 2.10".to_owned());
        assert_eq!(check_nccl_version_is_supported(0, 21_003), old);
        assert!(check_nccl_version_is_supported(3, 22_809).is_err());
    }

    unsafe extern "C" fn record_communicator_abort(raw: RawNcclCommunicator) -> c_int {
        // SAFETY: the pointer is the address of this test's flag, which is leaked and never freed.
        unsafe { &*raw.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
        0
    }

    #[test]
    fn an_nccl_call_that_does_not_return_is_aborted_once() {
        let waits = |milliseconds: u64| {
            let flag: &'static AtomicBool = Box::leak(Box::default());
            let first = SendableCommunicator(std::ptr::from_ref(flag).cast_mut().cast());
            let mut watchdog = NcclCallWatchdog::spawn_nccl_watchdog(
                record_communicator_abort,
                first,
                Duration::from_millis(100),
            );
            for _ in 0..2 {
                watchdog.run_nccl_call_under_watchdog(|| {
                    std::thread::sleep(Duration::from_millis(milliseconds))
                });
            }
            assert_eq!(watchdog.end_watchdog_thread(), flag.load(Ordering::SeqCst));
            watchdog.has_aborted_communicator()
        };
        assert!(!waits(1));
        assert!(waits(300));
    }
}
